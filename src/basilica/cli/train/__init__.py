"""`basilica train`: start, watch, resize and end runs."""

import typer

from basilica.cli.train import act, inspect, metrics, options, up, wait, watch

app = typer.Typer(help="Start, watch, resize and cancel runs.", no_args_is_help=True, rich_markup_mode=None)
app.command("up", cls=options.UpCommand, context_settings={"allow_extra_args": True})(up.up)
app.command("ls")(inspect.ls)
app.command("ps", hidden=True)(inspect.ps)
app.command("status")(inspect.status)
app.command("watch")(watch.watch)
app.command("wait")(wait.wait)
app.command("scale")(act.scale)
app.command("logs")(inspect.logs)
app.command("events")(inspect.events)
app.command("exits")(inspect.exits)
app.command("why")(inspect.why)
app.command("goodput")(inspect.goodput)
app.command("metrics")(metrics.metrics)
app.command("checkpoints")(inspect.checkpoints)
app.command("bench")(inspect.bench)
app.command("cancel")(act.cancel)
app.command("down")(act.down)
app.command("rerun")(up.rerun)
app.command("exec", cls=options.WithRest)(act.exec_)
app.command("prune")(act.prune)
