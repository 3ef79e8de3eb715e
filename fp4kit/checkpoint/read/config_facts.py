# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the quantization of a config.json means, by the method that it names.

A value of another JSON type than the method's schema has is an error that names the key, wherever
it stands. So is a key that is not known here: it may change what the stored numbers mean, as
rotations, zero points and low-rank corrections do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fp4kit.checkpoint.layouts import comfy, compressed_tensors, deepseek, modelopt
from fp4kit.checkpoint.read.code_names import COMFY_FORMATS
from fp4kit.errors import FileFormatError
from fp4kit.formats import ALL_FORMATS

#: ModelOpt's names of algorithms to block formats; others are named in the error.
MODELOPT_FORMATS = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}
#: Algorithms of single layers whose weights are decoded as FP8.
MODELOPT_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL")
COMPRESSED_FORMATS = {text: name for name, text in compressed_tensors.FORMATS.items()}
COMPRESSED_FORMATS |= {"mxfp8-quantized": "mxfp8"}
#: Formats of groups whose weights are FP8 with a scale per tensor, channel or block.
COMPRESSED_FP8 = ("float-quantized", "naive-quantized")
MIXED = compressed_tensors.MIXED
#: What weights in FP8 are called among formats.
FP8 = "fp8"

# Keys that are understood; anything else that holds something is refused.
_COMPRESSED_KEYS = frozenset((
    "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio", "version", "run_compressed", "moe_sparsity_config", "producer",
))  # fmt: skip
_GROUP_KEYS = frozenset((
    "targets", "weights", "input_activations", "output_activations", "format",
    # As ModelOpt writes them.
    "has_zero_point", "pre_quant_scale", "quant_algo", "group_size",
))  # fmt: skip
_WEIGHT_KEYS = frozenset((
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mx",
))  # fmt: skip
_MODELOPT_KEYS = frozenset((
    "config_groups", "ignore", "quant_algo", "producer", "quant_method", "kv_cache_scheme",
    "kv_cache_quant_algo", "group_size", "exclude_modules", "quantized_layers", "has_zero_point",
    "pre_quant_scale", "awq_block_size", "version",
))  # fmt: skip
#: Orders of activations that leave the stored columns as they are.
_HARMLESS_ORDERS = (None, False, "weight", "static")


@dataclass(frozen=True)
class QuantFacts:
    """What the JSON files say.

    Attributes:
        method: `quant_method`, or `comfy`.
        formats: block formats of the weights; empty if the method has none of ours.
        ignore: patterns of modules that are not quantized.
        activations: whether activations are quantized.
        kv_cache: how the KV cache is quantized, "" if it is not.
        faults: what engines would stumble over.
        fp8: some weights are FP8 beside those in a block format.
        pre_scaled: the readers multiply inputs by the scales that AWQ stores.
        layers: what is said about single modules: name to format.
        targets: pattern of modules to the formats that groups with it have, if there are several
            groups; `fp8` is one.
    """

    method: str
    formats: frozenset[str] = frozenset()
    ignore: tuple[str, ...] = ()
    activations: bool = False
    kv_cache: str = ""
    faults: tuple[str, ...] = ()
    fp8: bool = False
    pre_scaled: bool = False
    layers: dict[str, str] = field(default_factory=dict)
    targets: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        """The layout's name; that of the method, but for DeepSeek's."""
        return deepseek.DeepSeek.name if self.method == deepseek.METHOD else self.method


def strings(value: object, what: str) -> tuple[str, ...]:
    """A list of names, empty for null."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise FileFormatError(f"{what} is not a list of names")
    return tuple(value)


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileFormatError(f"{what} is no object")
    return value


def _known(given: dict[str, Any], known: Collection[str], what: str) -> None:
    """Refuses keys that may change what the weights mean."""
    for key, value in given.items():
        if key not in known and value not in (None, False, "", {}, []):
            raise FileFormatError(
                f"{what} has {key!r}, which is not understood here: it may change what the stored "
                "weights mean. Give the original checkpoint"
            )


def _weights(group: dict[str, Any], what: str) -> dict[str, Any]:
    """The arguments of a group's weights, with everything refused that changes values."""
    arguments = _object(group.get("weights") or {}, f"{what}.weights")
    _known(arguments, _WEIGHT_KEYS, f"{what}.weights")
    if arguments.get("symmetric") not in (None, True) or group.get("has_zero_point"):
        raise FileFormatError(f"{what}: weights with zero points (asymmetric) are not read here")
    if arguments.get("actorder") not in _HARMLESS_ORDERS:
        raise FileFormatError(
            f"{what}: actorder {arguments['actorder']!r} permutes columns, which is not read here"
        )
    return arguments


def _groups(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, group) of each of config_groups."""
    found = config.get("config_groups")
    if not isinstance(found, dict) or not found:
        raise FileFormatError("config.json: quantization_config has no config_groups")
    for name, group in found.items():
        what = f"config.json: config_groups.{name}"
        yield what, _object(group, what)


def _block_faults(arguments: dict[str, Any], format: str) -> Iterator[str]:
    size = arguments.get("group_size")
    block = ALL_FORMATS[format].block_size
    if size not in (None, block):
        yield f"group_size is {str(size)[:80]}, blocks of {format} have {block}"


def _is_fp8(arguments: dict[str, Any]) -> bool:
    """Whether weights are FP8, which are decoded as views."""
    size = arguments.get("group_size")
    return arguments.get("num_bits") == 8 and arguments.get("type") == "float" and size != 32


def compressed_facts(config: dict[str, Any]) -> QuantFacts:
    """What a `quantization_config` of compressed-tensors says."""
    _known(config, _COMPRESSED_KEYS, "config.json: quantization_config")
    formats: set[str] = set()
    faults: list[str] = []
    activations = fp8 = False
    targets: dict[str, frozenset[str]] = {}
    found = list(_groups(config))
    for what, group in found:
        _known(group, _GROUP_KEYS, what)
        arguments = _weights(group, what)
        listed = strings(group.get("targets"), f"{what}.targets")
        if _is_fp8(arguments):
            fp8 = True
            targets |= {name: targets.get(name, frozenset()) | {FP8} for name in listed}
            continue
        text = group.get("format") or config.get("format")
        if not isinstance(text, str) or text not in COMPRESSED_FORMATS:
            raise FileFormatError(
                f"config.json: compressed-tensors format {str(text)[:80]!r} is not read here; "
                f"known are {', '.join(sorted({*COMPRESSED_FORMATS, *COMPRESSED_FP8}))}"
            )
        faults += _block_faults(arguments, COMPRESSED_FORMATS[text])
        format = COMPRESSED_FORMATS[text]
        targets |= {name: targets.get(name, frozenset()) | {format} for name in listed}
        formats.add(format)
        activations |= group.get("input_activations") is not None
    if config.get("quantization_status") != "compressed":
        faults.append(
            "quantization_status is not 'compressed': transformers would leave the weights random"
        )
    if len(formats) + fp8 > 1 and config.get("format") != MIXED:
        faults.append(f"its groups have several formats, but its own format is not {MIXED!r}")
    scheme = config.get("kv_cache_scheme")
    return QuantFacts(
        compressed_tensors.METHOD,
        frozenset(formats),
        strings(config.get("ignore"), "config.json: quantization_config.ignore"),
        activations,
        "" if scheme is None else str(scheme),
        tuple(faults),
        fp8,
        targets=targets if len(found) > 1 else {},
    )


def _algorithm(value: object, what: str) -> str:
    """A known algorithm of ModelOpt, in capitals."""
    name = value.upper() if isinstance(value, str) else ""
    if name not in MODELOPT_FORMATS and name not in MODELOPT_FP8 and name != modelopt.MIXED:
        raise FileFormatError(
            f"{what}: ModelOpt algorithm {str(value)[:80]!r} is not read here; known are "
            f"{', '.join((*MODELOPT_FORMATS, *MODELOPT_FP8))}, and {modelopt.MIXED} of these"
        )
    return name


def _layers(value: object, what: str) -> dict[str, str]:
    """Modules to algorithms, of MIXED_PRECISION."""
    found = {}
    for module, facts in _object(value, f"{what}.quantized_layers").items():
        where = f"{what}.quantized_layers.{module}"
        known = _object(facts, where)
        _known(known, _MODELOPT_KEYS, where)
        found[module] = _algorithm(known.get("quant_algo"), where)
        if known.get("has_zero_point"):
            raise FileFormatError(f"{where}: zero points are not read here")
    if not found:
        raise FileFormatError(f"{what}.quantized_layers names no module")
    return found


def _modelopt_faults(given: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Where the two files of ModelOpt contradict each other."""
    faults = []
    if given.get("quant_algo") != own.get("quant_algo"):
        faults.append(
            f"quant_algo is {str(given.get('quant_algo'))[:80]!r}, in hf_quant_config.json "
            f"{str(own.get('quant_algo'))[:80]!r}"
        )
    listed = strings(given.get("ignore"), "config.json: quantization_config.ignore")
    excluded = strings(own.get("exclude_modules"), "hf_quant_config.json: exclude_modules")
    if set(listed) != set(excluded):
        faults.append("ignore and exclude_modules of hf_quant_config.json differ")
    return faults


def modelopt_facts(config: dict[str, Any] | None, hf_quant: dict[str, Any] | None) -> QuantFacts:
    """What the two files of ModelOpt say."""
    inner = (hf_quant or {}).get("quantization")
    own = _object(inner or {}, "hf_quant_config.json: quantization")
    given = config or {}
    what = "config.json: quantization_config" if hf_quant is None else "hf_quant_config.json"
    for keys, where in ((given, "config.json: quantization_config"), (own, what)):
        _known(keys, _MODELOPT_KEYS, where)
        if keys.get("has_zero_point"):
            raise FileFormatError(f"{where}: weights with zero points are not read here")
    groups = list(_groups(given)) if given.get("config_groups") else []
    for where, group in groups:
        _known(group, _GROUP_KEYS, where)
        _weights(group, where)
    algorithm = _algorithm(own.get("quant_algo") or given.get("quant_algo"), what)
    layers: dict[str, str] = {}
    if algorithm == modelopt.MIXED:
        said = own.get("quantized_layers") or given.get("quantized_layers")
        layers = _layers(said, what)
    algorithms = set(layers.values()) or {algorithm}
    faults = []
    if config is not None and hf_quant is not None:
        faults += _modelopt_faults(given, own)
    if config is None:
        faults.append("has no quantization_config (only hf_quant_config.json has)")
    activations = not algorithms.isdisjoint((*modelopt.ACTIVATED, MODELOPT_FP8[0]))
    if algorithm == modelopt.PRE_SCALED and groups:
        # The one algorithm of AWQ; whether inputs are quantized as well only the groups say.
        activations = any(group.get("input_activations") is not None for _, group in groups)
    ignore = own.get("exclude_modules") if hf_quant is not None else given.get("ignore")
    kv_cache = own.get("kv_cache_quant_algo")
    return QuantFacts(
        modelopt.METHOD,
        frozenset(MODELOPT_FORMATS[name] for name in algorithms if name in MODELOPT_FORMATS),
        strings(ignore, f"{what}: exclude_modules"),
        activations,
        "" if kv_cache is None else str(kv_cache),
        tuple(faults),
        not algorithms.isdisjoint(MODELOPT_FP8),
        modelopt.PRE_SCALED in algorithms,
        layers,
    )


def comfy_facts(layers: dict[str, str]) -> QuantFacts:
    """What ComfyUI's headers and markers say."""
    for module, said in layers.items():
        if said not in comfy.FORMATS and said not in COMFY_FORMATS:
            raise FileFormatError(
                f"ComfyUI layer format {said!r} of {module!r} is not read here; known are "
                f"{', '.join((*comfy.FORMATS, *COMFY_FORMATS))}"
            )
    named = set(layers.values())
    formats = frozenset(name for name in named if name in comfy.FORMATS)
    return QuantFacts(comfy.METHOD, formats, fp8=not named.isdisjoint(COMFY_FORMATS), layers=layers)


def detect(
    config: dict[str, Any], hf_quant: dict[str, Any] | None, headers: Iterable[dict[str, str]]
) -> QuantFacts | None:
    """What the JSON files and headers of a checkpoint say about its quantization.

    Returns:
        The facts, None if it does not say that it is quantized. Methods that are not read here
        come with their name and nothing else.
    """
    given = config.get("quantization_config")
    if given is None and isinstance(config.get("text_config"), dict):
        given = config["text_config"].get("quantization_config")
    if given is None:
        given = config.get("compression_config")
    if given is not None and not isinstance(given, dict):
        raise FileFormatError("config.json: quantization_config is no object")
    method = given.get("quant_method") if given is not None else None
    if method == modelopt.METHOD or (given is None and hf_quant is not None):
        return modelopt_facts(given, hf_quant)
    if method == compressed_tensors.METHOD:
        assert given is not None
        return compressed_facts(given)
    if given is not None and method == deepseek.METHOD:
        what = "config.json: quantization_config.modules_to_not_convert"
        listed = strings(given.get("modules_to_not_convert"), what)
        return QuantFacts(deepseek.METHOD, ignore=listed, fp8=True)
    if given is not None:
        return QuantFacts(str(method or "an unnamed method")[:80])
    layers = comfy.recorded_layers(headers, "header")
    if layers:
        return comfy_facts(layers)
    return None
