# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Known faults of transformers are its own: files that compressed-tensors writes fail alike.

One model type or more for each kind of row in `checkpoint/models/reader_faults.py`. The same small
model, with the same ignore list, is written by fp4kit and by compressed-tensors' ModelCompressor as
LLM Compressor uses it; transformers has to stop at the same place with the same error.
"""

from __future__ import annotations

import importlib
import traceback

import pytest

from fp4kit.checkpoint.models.reader_faults import KNOWN
from fp4kit.checkpoint.operations import quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.read.directory import Checkpoint

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")

from compressed_tensors import ModelCompressor  # noqa: E402
from compressed_tensors import quantization as schemes  # noqa: E402

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

model_types = importlib.import_module("model_types")
round_trips = importlib.import_module("round_trip")
tiny_models = importlib.import_module("tiny_models")
#: Model type to the function of transformers, or of its model, that stops.
STOPS = {
    "siglip": "_init_weights",
    "t5": "_init_weights",
    "wav2vec2": "_init_weights",
    "falcon": "_init_weights",
    "neomme": "mark_tied_weights_as_initialized",
    "zamba": "mark_tied_weights_as_initialized",
    "dinov2": "update_weight_conversions",
    "kimi_linear": "log_state_dict_report",
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Nothing need survive a power cut, and what libraries report is not looked at."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def written_by_compressed_tensors(model, ignore, folder):
    """Quantizes a model in place with scales of one, and saves it."""
    scheme = schemes.preset_name_to_scheme("MXFP4A16", ["Linear"])
    config = schemes.QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore)
    schemes.apply_quantization_config(model, config)
    scaled = [m for m in model.modules() if "weight_scale" in m._parameters]
    for module in scaled:
        module.weight_scale.data.fill_(1)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.quantization_config.ignore = ignore
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return len(scaled)


def both(model_type, folder):
    """The class of a model, and the directories that fp4kit and compressed-tensors write of it."""
    model, source = round_trips.save(model_type, model_types.class_names()[model_type], folder)
    ours, theirs = folder / "ours", folder / "theirs"
    quantize_checkpoint(source, ours, CheckpointOptions(format="mxfp4"))
    with Checkpoint(ours) as checkpoint:
        ignore = checkpoint.config["quantization_config"]["ignore"]
    count = written_by_compressed_tensors(model, ignore, theirs)
    assert count > 0
    return type(model), ours, theirs


def stops(error):
    """(kind of error, its text, the functions that it came through)."""
    frames = tuple(frame.name for frame in traceback.extract_tb(error.__traceback__))
    return type(error), str(error), frames


@pytest.mark.parametrize("model_type", STOPS)
def test_a_file_of_compressed_tensors_stops_at_the_same_place(model_type, tmp_path):
    assert model_type in KNOWN
    cls, *folders = both(model_type, tmp_path)
    found = []
    for folder in folders:
        # What transformers raises is what is compared.
        with pytest.raises(Exception) as raised:  # noqa: PT011
            round_trips.load(folder, cls)
        found.append(stops(raised.value))
    assert found[0] == found[1]
    assert any(STOPS[model_type] in name for name in found[0][2])


def test_a_file_of_compressed_tensors_stops_while_it_runs(tmp_path):
    """CTRL loads, and fails when it computes."""
    cls, *folders = both("ctrl", tmp_path)
    found = []
    for folder in folders:
        model, wrong = round_trips.load(folder, cls)
        assert not wrong
        inputs = next(tiny_models.candidate_inputs(model))
        with pytest.raises(Exception) as raised:  # noqa: PT011
            tiny_models.computed(model, inputs)
        found.append(stops(raised.value))
    assert found[0] == found[1]
