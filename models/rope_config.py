"""Rotary-embedding settings out of config.json, in each of the spellings transformers has had.

The settings stand in `rope_scaling` (with `type` or `rope_type`, beside a top-level `rope_theta`) or,
since transformers 5, in `rope_parameters` (with `rope_type` and `rope_theta` inside).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from twopool.protocol.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]

_DEFAULT_THETA = 10_000.0
_SPELLINGS = ("rope_scaling", "rope_parameters")  # where both stand, transformers takes the first


@dataclass(frozen=True)
class RopeConfig:
    """What `twopool.models.rope` needs to compute the rotation angles; unused fields keep defaults."""

    kind: RopeKind = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(raw: Mapping[str, object]) -> RopeConfig:
    """Read the rope settings of a config.json; ModelError names the field it cannot serve."""
    spelling, settings = _settings(raw)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in get_args(RopeKind):
        supported = ", ".join(get_args(RopeKind))
        raise ModelError(
            f"config.json: {spelling} has the rope type {kind!r}, which is not supported (supported: {supported})"
        )
    fields = _Fields(spelling, settings)
    rotary_fraction = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if rotary_fraction not in (None, 1, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor {rotary_fraction!r} is not supported, only 1.0")
    theta = fields.number("rope_theta") or _Fields("config.json", raw).number("rope_theta")
    theta = theta or _DEFAULT_THETA
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=fields.required("factor"))
    original = _original_length(raw, fields)
    if kind == "llama3":
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=fields.required("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=fields.required("low_freq_factor"),
            high_freq_factor=fields.required("high_freq_factor"),
        )
    return _yarn(raw, fields, theta=theta, original=original)


def scaled_context(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The context a model can serve, in tokens.

    yarn: factor x original length. linear: factor x max_position_embeddings, which is the length
    before scaling there. llama3 and default: max_position_embeddings, which is the length already
    scaled.
    """
    if rope.kind == "yarn":
        return int(rope.factor * rope.original_max_position_embeddings)
    if rope.kind == "linear":
        return int(rope.factor * max_position_embeddings)
    return max_position_embeddings


class _Fields:
    """Typed access to one group of settings; errors name the group and the field."""

    def __init__(self, group: str, values: Mapping[str, object]) -> None:
        self._group = group
        self._values = values

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"config.json: {self._group}: {name} must be a positive number, not {value!r}")
        return float(value)

    def required(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise ModelError(f"config.json: {self._group} lacks {name}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {self._group}: {name} must be true or false")
        return value


def _settings(raw: Mapping[str, object]) -> tuple[str, Mapping[str, object]]:
    for spelling in _SPELLINGS:
        value = raw.get(spelling)
        if not value:
            continue
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {spelling} must be an object, not {value!r}")
        if any(isinstance(entry, dict) for entry in value.values()):
            raise ModelError(f"config.json: {spelling} differs by layer type, which is not supported")
        return spelling, value
    return "rope_scaling", {}


def _original_length(raw: Mapping[str, object], fields: _Fields) -> int:
    """transformers' order: a top-level value, the settings' own, max_position_embeddings."""
    top = _Fields("config.json", raw)
    original = (
        top.number("original_max_position_embeddings")
        or fields.number("original_max_position_embeddings")
        or top.required("max_position_embeddings")
    )
    return int(original)


def _yarn(raw: Mapping[str, object], fields: _Fields, *, theta: float, original: int) -> RopeConfig:
    factor = fields.number("factor")
    if factor is None:
        factor = _Fields("config.json", raw).required("max_position_embeddings") / original
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=fields.number("attention_factor"),
        beta_fast=fields.number("beta_fast") or 32.0,
        beta_slow=fields.number("beta_slow") or 1.0,
        mscale=fields.number("mscale"),
        mscale_all_dim=fields.number("mscale_all_dim"),
        truncate=fields.flag("truncate", True),
    )
