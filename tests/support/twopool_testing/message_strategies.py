"""Hypothesis strategies for every message, built from the types themselves."""

from typing import Any

import msgspec.inspect as mi
from hypothesis import strategies as st
from msgspec import Struct


def messages(struct: type[Struct]) -> st.SearchStrategy[Struct]:
    """Valid instances of a message type, its optional fields given or not."""
    return _of(mi.type_info(struct))


def _of(kind: mi.Type) -> st.SearchStrategy[Any]:
    match kind:
        case mi.StructType():
            required = {f.name: _of(f.type) for f in kind.fields if f.required}
            optional = {f.name: _of(f.type) for f in kind.fields if not f.required}
            return st.fixed_dictionaries(required, optional=optional).map(lambda fields: _build(kind.cls, fields))
        case mi.UnionType():
            return st.one_of([_of(part) for part in kind.types])
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            low = kind.ge if kind.ge is not None else -(2**63) if kind.gt is None else kind.gt + 1
            high = kind.le if kind.le is not None else 2**63 - 1
            return st.integers(int(low), int(high))
        case mi.FloatType():
            least = kind.ge if kind.ge is not None else kind.gt
            return st.floats(least, kind.le, exclude_min=kind.gt is not None, allow_nan=False)
        case mi.StrType():
            return st.text(
                st.characters(exclude_categories=["Cs"]), min_size=kind.min_length or 0, max_size=kind.max_length or 20
            )
        case mi.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 20, 20))
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.VarTupleType():
            return st.lists(_of(kind.item_type), min_size=kind.min_length or 0, max_size=3).map(tuple)
        case mi.DictType():
            return st.dictionaries(_of(kind.key_type), _of(kind.value_type), max_size=3)
        case mi.TupleType():
            return st.tuples(*[_of(item) for item in kind.item_types])
    raise TypeError(f"no strategy for {kind}")


def _build(cls: type[Struct], fields: dict[str, Any]) -> Struct:
    if cls.__name__ == "KvGeometry":  # fields that depend on each other
        fields["block_size"] = 16
        fields["num_kv_heads"] = 65536
        fields["num_kv_heads_local"] = 1
        fields["kv_head_start"] = fields.get("kv_head_start", 0) % 65535
        fields["tp_size"] = 2**31 - 1
        fields["tp_rank"] = fields.get("tp_rank", 0) % (2**31 - 1)
    return cls(**fields)
