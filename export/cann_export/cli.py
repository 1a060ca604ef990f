"""`cann-export`: the offline stage's command line. Arguments in, artifact and report out; errors in one line, exit 2.

`cann-export MODEL` exports; `recipes`, `inspect`, `why`, `verify`, `onnx`, `compile` and `toolchain install` are
subcommands.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from cann_runtime.arguments import Parser
from cann_runtime.errors import CannError, RecipeError

EPILOG = """\
other commands:
  cann-export recipes                       list the recipes that come with the package
  cann-export inspect ARTIFACT [--json]     what is in an artifact
  cann-export why ARTIFACT ARTIFACT         which setting makes two artifacts differ
  cann-export verify ARTIFACT [--layers N]  prove its graphs on this CPU, rung by rung, against transformers
  cann-export onnx ARTIFACT -o FOLDER       its ONNX models (made with --emit onnx) as files for other tools
  cann-export compile ARTIFACT              on a host with CANN: fill the artifact's cache of compiled graphs
  cann-export toolchain install [--wheel F] unpack torch-npu for exporting on hosts without CANN
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code (0 done, 1 artifacts differ or do not verify, 2 user error)."""
    # torch must not go looking for device packages: on a host without CANN that import fails.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # Notes of libraries to their developers are no messages to our users.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    try:
        with warnings.catch_warnings():
            if not debug and not sys.warnoptions:
                warnings.simplefilter("ignore")
            command = COMMANDS.get(args[0]) if args else None
            return command(args[1:]) if command else _export(args)
    except CannError as error:
        if debug:
            raise
        print(f"cann-export: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("cann-export: interrupted; nothing was written", file=sys.stderr)
        return 130


def _export(argv: list[str]) -> int:
    from cann_export.recipes_dir import recipes_dir
    from cann_runtime.recipe import add_recipe_flags, load_recipe, overrides_from, resolve, with_model

    parser = Parser(
        prog="cann-export",
        description="Export a model to graphs compiled ahead, packed as an artifact that cann-run loads.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a recipe's name, a recipe file (.yaml), or a Hugging Face checkpoint folder")
    parser.add_argument("-o", "--output", type=Path, help="artifact folder (default: artifacts/NAME)")
    parser.add_argument("--emit", choices=["onnx"], help="also write every graph in this format (cann-export onnx)")
    parser.add_argument("--verify", action="store_true", help="prove the artifact afterwards (cann-export verify)")
    parser.add_argument("--quiet", action="store_true", help="no progress and no report")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    add_recipe_flags(parser)
    args = parser.parse_args(argv)

    recipe = load_recipe(args.model, recipes_dir())
    overrides = overrides_from(args)
    # The checkpoint's own config.json wins over the recipe's.
    source = args.checkpoint or recipe.checkpoint
    settings = resolve(recipe, overrides)
    checkpoint = None
    if importlib.util.find_spec("transformers") is None:
        raise CannError("exporting needs transformers, which is not installed: pip install 'cann-export[export]'")
    if args.emit == "onnx":
        _need_onnx()

    from cann_export.pipeline import export
    from cann_export.progress import Progress, print_report

    progress = Progress(args.quiet)
    if source is not None:
        from cann_export.checkpoint import load_config, resolve_checkpoint

        checkpoint = resolve_checkpoint(source, progress.log)
        config = load_config(checkpoint)
        settings = resolve(with_model(recipe, config, str(checkpoint / "config.json")), overrides)
    elif settings.pack_weights:
        raise RecipeError("pack_weights: there is no checkpoint to pack; give --checkpoint, or set pack_weights: false")
    output = args.output or Path("artifacts") / settings.name
    report = export(settings, output, checkpoint, progress, onnx=args.emit == "onnx")
    print_report(report, progress.console)
    if args.verify:
        from cann_export.verify.command import verify_exported

        return verify_exported(output, checkpoint, progress)
    return 0


def _recipes(argv: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    from cann_export.recipes_dir import recipes_dir
    from cann_runtime.recipe import list_recipes, load_recipe, resolve

    parser = Parser(prog="cann-export recipes", description="List the recipes of the package.")
    parser.parse_args(argv)
    table = Table("recipe", "model", "layers", "hidden", "target", "tp", "batch", "seq len")
    for name in list_recipes(recipes_dir()):
        s = resolve(load_recipe(name, recipes_dir()))
        c = s.config
        row = (
            c["model_type"],
            c["num_hidden_layers"],
            c["hidden_size"],
            s.target,
            s.tp,
            s.max_batch_size,
            s.max_seq_len,
        )
        table.add_row(name, *map(str, row))
    Console().print(table)
    return 0


def _inspect(argv: list[str]) -> int:
    from cann_export.inspect import inspect_artifact

    parser = Parser(prog="cann-export inspect", description="Show what is in an artifact.")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--json", action="store_true", help="plain JSON on stdout")
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    inspect_artifact(args.artifact, args.json)
    return 0


def _why(argv: list[str]) -> int:
    from cann_export.why import why

    parser = Parser(
        prog="cann-export why", description="Say which settings make two artifacts differ. Exit code 1 where any does."
    )
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    return why(args.a, args.b)


def _verify(argv: list[str]) -> int:
    from cann_export.verify.command import main as verify_main

    return verify_main(argv)


def _need_onnx() -> None:
    if importlib.util.find_spec("onnx") is None:
        raise CannError("ONNX models need onnx, which is not installed: pip install 'cann-export[onnx]'")


def _onnx(argv: list[str]) -> int:
    _need_onnx()
    from cann_export.lower.onnx_folder import main as onnx_main

    return onnx_main(argv)


def _compile(argv: list[str]) -> int:
    from cann_export.compile import main as compile_main

    return compile_main(argv)


def _toolchain(argv: list[str]) -> int:
    from cann_export.lower.ascend.toolchain import install

    parser = Parser(prog="cann-export toolchain", description="The Ascend converter of this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="unpack torch-npu into a cache folder, over stub CANN libraries")
    installing.add_argument("--wheel", type=Path, help="a torch_npu wheel file (default: from the package index)")
    installing.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    folder = install(args.wheel, lambda text: print(text, file=sys.stderr))
    print(folder)
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "recipes": _recipes,
    "inspect": _inspect,
    "why": _why,
    "verify": _verify,
    "onnx": _onnx,
    "compile": _compile,
    "toolchain": _toolchain,
}

if __name__ == "__main__":
    sys.exit(main())
