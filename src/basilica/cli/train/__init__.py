"""`basilica train`: start, watch, resize and end runs."""

import typer

from basilica.cli.train import act, look, metrics, options, up, wait, watch

app = typer.Typer(help="Start, watch, resize and end runs.", no_args_is_help=True, rich_markup_mode=None)
app.command("up", cls=options.UpCommand, context_settings={"allow_extra_args": True})(up.up)
app.command("ls")(look.ls)
app.command("ps", hidden=True)(look.ps)
app.command("status")(look.status)
app.command("watch")(watch.watch)
app.command("wait")(wait.wait)
app.command("scale")(act.scale)
app.command("logs")(look.logs)
app.command("events")(look.events)
app.command("exits")(look.exits)
app.command("why")(look.why)
app.command("metrics")(metrics.metrics)
app.command("bench")(look.bench)
app.command("cancel")(act.cancel)
app.command("down")(act.down)
app.command("rerun")(up.rerun)
app.command("exec", cls=options.WithRest)(act.exec_)
app.command("prune")(act.prune)
