"""Everything that is asked of a log, in order: of findings of one severity, the earlier one is the verdict's."""

from dflash_nb.analysis.findings import curve, learning, process, spikes
from dflash_nb.analysis.findings.finding import Check

CHECKS = (
    Check("not finite", "Is every loss a number?", curve.not_finite),
    Check("acceptance stuck", "Are drafted tokens accepted?", learning.acceptance_stuck, ("loss", "acceptance"), 100),
    Check("resume jump", "Does a resumed run go on as before?", process.resume_jump, ("loss",)),
    Check("divergence", "Has the loss left its best for good?", curve.diverged, ("loss",), 30),
    Check("nothing learned", "Does the loss move?", curve.nothing_learned, ("loss", "lr"), 60),
    Check(
        "held-out drifts",
        "Do held-out and training loss fall together?",
        learning.heldout_drift,
        ("loss", "evaluations"),
        least_evaluations=3,
    ),
    Check("group does not learn", "Do all lengths learn?", learning.group_not_learning, ("loss", "lengths"), 60),
    Check("later slots do not learn", "Do all slots of a block learn?", learning.later_slots, ("slot_accuracy",), 60),
    Check("rate too low", "Is the learning rate high enough?", curve.rate_too_low, ("loss", "lr"), 80),
    Check("rate too high", "Is the learning rate low enough?", curve.rate_too_high, ("loss", "lr"), 80),
    Check("spikes", "Does a batch lie far above its own baseline?", spikes.spikes, ("loss",), 30),
    Check("plateau", "Does the loss still fall?", curve.plateau, ("loss", "lr"), 200),
    Check("static composition", "Do batches mix?", process.static_composition, ("lengths",), 20),
    Check("warm-up", "Is the rate still rising?", curve.warming_up, ("lr",), 3),
    Check("epoch border", "Is the loss even across epochs?", process.epoch_steps, ("loss", "epoch"), 40),
    Check("bucket mix", "How much movement is the mix of lengths?", curve.bucket_mix, ("loss", "lengths"), 60),
    Check("not finished", "Did the run end as planned?", process.not_finished, ("loss",)),
    Check("always clipped", "Is clipping the exception?", curve.always_clipped, ("grad_norm", "clipped"), 60),
    Check("starved", "Does the drafter wait?", process.starved, ("seconds_wait",), 20),
    Check("slower", "Does a step take as long as before?", process.slower, ("seconds_step",), 100),
    Check("short batches", "Do short batches scatter?", process.short_batches, ("lengths",), 30),
    Check("off plan", "Did padding and speed come as planned?", process.off_plan, ("plan",), 50),
    Check("holes", "Is the log whole?", process.holes, ("step",), 1),
)
