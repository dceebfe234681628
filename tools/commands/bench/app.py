"""`hoist bench ...`: puts its commands together, in the order of its help.

What each takes is in a file of its own; errors become one line in `exits.py`.
"""

from __future__ import annotations

from hoist.tools.commands.bench import io, optim, peers, show, sleep, step, zero_infinity
from hoist.tools.loudness import LoudApp

app = LoudApp(
    name="bench", no_args_is_help=True, rich_markup_mode="rich",
    help="Measure: drives, the optimizer, steps of hoist and of others. What sides do not do alike is not compared.",
)  # fmt: skip
app.command("io", epilog=io.EPILOG)(io.bench_io)
app.command("optim", epilog=optim.EPILOG)(optim.bench_optim)
app.command("step", epilog=step.EPILOG)(step.bench_step)
app.command("sleep", epilog=sleep.EPILOG)(sleep.bench_sleep)
app.command("zero-infinity", epilog=zero_infinity.EPILOG)(zero_infinity.bench_zero_infinity)
app.command("peers", epilog=peers.EPILOG)(peers.bench_peers)
app.command("show", epilog=show.EPILOG)(show.bench_show)
