"""Options that several subcommands share."""

from __future__ import annotations

import argparse


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """MODEL, --device, --device-map and --dtype."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an embedded model (see `quantize-state ls`), a Hugging Face directory, or a hub id",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--device-map",
        choices=("auto",),
        help="spread a model that is too large for one device over all of them (needs accelerate)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights and activations; auto is float32 on a CPU and the model's own elsewhere",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let a model directory or hub repository run its own code"
    )


def quiet_transformers() -> None:
    """No loading bars and no advice on other kernels: standard output and error are for this command's words."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
