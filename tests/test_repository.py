"""What the repository promises about itself: layers, sizes, and a README whose numbers come from results/."""

import ast
import importlib
import re
import subprocess
from pathlib import Path

import pytest

from quantize_state.evals.result import Result
from quantize_state.evals.table import BEGIN, END, markdown_table
from quantize_state.quant.policy import parse_arm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted((ROOT / "results" / "accuracy").glob("*.json"))

LAYERS = ["quant", "kernels", "adapters", "integrations", "evals", "cli"]
"""A module imports only from its left."""


def folder(layer):
    return ROOT / layer if layer in ("quant", "kernels", "evals") else ROOT / "src" / "quantize_state" / layer


@pytest.mark.parametrize("layer", LAYERS)
def test_modules_import_only_from_their_left(layer):
    forbidden = LAYERS[LAYERS.index(layer) + 1 :]
    wrong = []
    for path in folder(layer).rglob("*.py"):
        package = ["quantize_state", layer, *path.relative_to(folder(layer)).parent.parts]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1]
                target = base + (node.module.split(".") if node.module else [])
                names = [target[1]] if len(target) > 1 else [alias.name for alias in node.names]
                wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in names if name in forbidden]
    assert not wrong


def test_kernels_never_import_transformers_and_have_no_init_file():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "transformers executes a package called kernels"
    for path in [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "quant").rglob("*.py")]:
        assert not re.search(r"^\s*(import|from) transformers", path.read_text(encoding="utf-8"), re.MULTILINE), path


@pytest.mark.parametrize("oracle", ["modelopt.torch.quantization.qtensor", "ml_dtypes", "scipy", "triton"])
def test_what_tests_compare_with_is_installed(oracle):
    """Tests skip themselves without it; the test extra brings it, so in a checkout that means a broken setup."""
    importlib.import_module(oracle)


def test_files_stay_small():
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    large = [name for name in listed.decode().split("\0") if name and (ROOT / name).stat().st_size > 16 * 2**20]
    assert not large


def test_the_readme_shows_what_results_hold():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = readme.split(BEGIN)[1].split(END)[0]
    assert block.strip() == markdown_table(RESULTS).strip(), "run `make report`"


@pytest.mark.parametrize(
    ("arm", "resident", "moved"),
    [
        ("reference", 4, 8),
        ("replay-fp32", 4, 4.25),
        ("decoupled-nvfp4", 4.56, 1.06),
        ("decoupled-fp8", 5.03, 1.53),
        ("coupled-nvfp4", 0.56, 1.13),
    ],
)
def test_the_cost_table_of_the_readme(arm, resident, moved):
    policy = parse_arm(arm)
    assert policy.bytes_resident == pytest.approx(resident, abs=0.005)
    assert policy.bytes_moved == pytest.approx(moved, abs=0.0051)
    assert f"| {resident} | {moved} |" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_evidence_supports_the_claims(path):
    """At 16K held-out tokens: replay at the floor, decoupled far below coupled, and flat where coupled grows."""
    result = Result.read(path)
    kl = {arm.name: arm.kl for arm in result.arms}
    assert result.status == "complete" and result.text.tokens >= 16384 and not result.provenance.git_dirty
    assert kl["replay-fp32"].mean < 3 * kl["reference-again"].mean
    assert kl["coupled-nvfp4"].ci95[0] > 100 * kl["decoupled-nvfp4"].ci95[1]
    assert kl["coupled-nvfp4-w16"].ci95[0] > 4 * kl["decoupled-nvfp4"].ci95[1]
    early, late = (
        [b.mean for b in kl[name].by_position if b.start >= 512] for name in ("coupled-nvfp4", "decoupled-nvfp4")
    )
    assert early[-1] > 1.3 * early[0], "coupled KL grows with position"
    assert max(late) < 3 * min(late), "decoupled KL does not"
    for arm in result.arms:
        if arm.name.startswith("decoupled"):
            assert all(layer.state_error < 1e-5 for layer in arm.layers), "the recurrence is FP32"
