"""The reference: torch's own optimizer run on each entry alone, over its active steps."""

import torch


def run_alone(kind, settings, start, gradients, masks, frozen_state, rates=None):
    """Where each entry ends.

    Args:
        kind: optimizer class.
        settings: its keyword arguments.
        start: initial values.
        gradients: a gradient a step; None where there is none.
        masks: a mask a step.
        frozen_state: "keep", "zero" or "drop".
        rates: a learning rate a step; None: that of the settings.
    """
    end = start.clone().view(-1)
    for entry in range(start.numel()):
        alone = torch.nn.Parameter(end[entry].clone())
        optimizer = kind([alone], **settings)
        was_active = True
        for step, (gradient, mask) in enumerate(zip(gradients, masks, strict=True)):
            active = bool(mask.expand(start.shape).reshape(-1)[entry])
            if was_active and not active and frozen_state != "keep":
                optimizer = kind([alone], **settings)
            was_active = active
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[step]
            if active and gradient is not None:
                alone.grad = gradient.reshape(-1)[entry].clone()
                optimizer.step()
        end[entry] = alone.detach()
    return end.view(start.shape)
