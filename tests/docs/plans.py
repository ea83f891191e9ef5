"""Plans of the commands that pages show."""

from gradpolicy.app.build import build_subject
from gradpolicy.app.config import Source, check_config, fixed_overrides, resolved
from gradpolicy.app.run import make_run_plan
from gradpolicy.planning.plan_table import Plan


def planned(configs: Source, words: list[str]) -> Plan:
    """Return the plan of a command."""
    with configs.open():
        job = configs.compose(fixed_overrides(words))
        check_config(job)
        return make_run_plan(build_subject(resolved(job)), seed=0)
