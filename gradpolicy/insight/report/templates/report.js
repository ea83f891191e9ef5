// Draws the figures of what is shown, and follows the reader's theme.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const touched = window.matchMedia("(pointer: coarse)").matches;
const hovers = window.matchMedia("(hover: hover)").matches;
const settings = {
  responsive: true,
  displaylogo: false,
  displayModeBar: hovers ? "hover" : false,
  modeBarButtonsToRemove: ["select2d", "lasso2d"],
};

function theme(place) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const look = { "font.color": colour("--text"), "font.family": "system-ui, sans-serif", "font.size": 12 };
  look["hoverlabel.bgcolor"] = colour("--card");
  look["hoverlabel.bordercolor"] = colour("--line");
  look["hoverlabel.font.color"] = colour("--text");
  if (place.layout.updatemenus) {
    look["updatemenus[0].bgcolor"] = colour("--card");
    look["updatemenus[0].font.color"] = colour("--text");
    look["updatemenus[0].bordercolor"] = colour("--line");
  }
  look["modebar.bgcolor"] = "rgba(0,0,0,0)";
  look["modebar.color"] = look["modebar.activecolor"] = colour("--faint");
  for (const axis of Object.keys(place.layout).filter((key) => /^[xy]axis/.test(key))) {
    look[axis + ".gridcolor"] = look[axis + ".zerolinecolor"] = colour("--line");
  }
  // A finger that moves over a figure scrolls the page.
  if (touched) look.dragmode = false;
  return look;
}

async function draw(place) {
  if (place.dataset.drawn) return;
  place.dataset.drawn = "yes";
  const data = document.querySelector(`script[data-for="${place.id}"]`);
  const figure = JSON.parse(data.textContent);
  await Plotly.newPlot(place, figure.data, figure.layout, settings);
  await Plotly.relayout(place, theme(place));
}

function drawShown() {
  for (const place of document.querySelectorAll(".plot")) {
    if (!place.closest("[hidden]")) draw(place);
  }
}

document.getElementById("run-choice")?.addEventListener("change", (event) => {
  const blocks = [...document.querySelectorAll("section.run")];
  blocks.forEach((block, index) => { block.hidden = String(index) !== event.target.value; });
  drawShown();
});
dark.addEventListener("change", () => {
  for (const place of document.querySelectorAll(".plot[data-drawn]")) Plotly.relayout(place, theme(place));
});
drawShown();
