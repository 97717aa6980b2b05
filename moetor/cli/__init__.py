"""The command line. One file a command; each loads transformers and triton only when it runs."""

import typer

from . import bench, demo, doctor, generate, tune

app = typer.Typer(
    name="moetor",
    help="Run the experts of Mixture-of-Experts models by interchangeable backends.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo.run)
app.command("generate")(generate.run)
app.command("doctor")(doctor.run)
app.command("bench")(bench.run)
app.command("tune")(tune.run)


def main() -> None:
    """The console script `moetor`."""
    app()
