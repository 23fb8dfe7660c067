"""The embedded model made hard, and an artifact for it; made once."""

import pytest
import stress

from oscar.calibration.calibrate import calibrate
from oscar.calibration.options import CalibrationOptions
from oscar.embedded import embedded_model
from oscar.format import artifact


@pytest.fixture(scope="session")
def outliers(tmp_path_factory):
    """(folder, artifact file): the embedded model with outliers, and the paper's method calibrated on it."""
    folder = tmp_path_factory.mktemp("outliers")
    stress.write("outliers", embedded_model(), folder)
    text = tuple(f"{folder / name}:2048" for name in ("heldout.txt", "heldout_code.txt"))
    options = CalibrationOptions(folder, text=text, method="oscar", dtype="float32", device="cpu", progress=False)
    made = calibrate(options)
    file = tmp_path_factory.mktemp("artifact") / "served.safetensors"
    artifact.save(made, file)
    return folder, file
