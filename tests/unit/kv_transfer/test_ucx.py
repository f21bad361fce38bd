"""Settings of UCX: what wins over what, and which names there are."""

import logging

import pytest

from twopool.kv_transfer.ucx import DEFAULTS, apply_settings, in_words, names_in, settings

LISTING = """
#
# Service level.
#
# syntax:    unsigned long: <number>, "inf", or "auto"
# inherits:  UCX_RC_SL, UCX_IB_SL
#
UCX_RC_VERBS_SL=auto
#
# See also UCX_NOT_A_SETTING=1.
#
# UCX_TLS=all
"""


def test_flags_win_over_the_environment_and_the_environment_over_our_defaults() -> None:
    environ = {"UCX_TLS": "all", "UCX_MODULES": "", "PATH": "/bin", "NIXL_LOG_LEVEL": "INFO"}
    result = settings({"UCX_TLS": "tcp"}, environ)
    assert result == {**DEFAULTS, "UCX_TLS": "tcp", "UCX_MODULES": "", "NIXL_LOG_LEVEL": "INFO"}
    assert list(result) == sorted(result)


def test_nothing_is_overridden_silently(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"UCX_TLS": "all", "UCX_RNDV_THRESH": "1m", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING):
        apply_settings({"UCX_TLS": "tcp", "UCX_RNDV_THRESH": "1m"}, environ)
    assert [record.message for record in caplog.records] == ["UCX_TLS=tcp, as the flags say; the environment had all"]
    assert environ == {**DEFAULTS, "UCX_TLS": "tcp", "UCX_RNDV_THRESH": "1m", "PATH": "/bin"}


def test_words_say_what_is_in_force_and_what_is_our_doing() -> None:
    words = in_words({"UCX_TLS": "tcp", "UCX_TCP_RX_SEG_SIZE": "256k"}, {"UCX_MODULES": "all"})
    assert words == (
        "NIXL_LOG_LEVEL=WARN (the default of twopool), UCX_MODULES=all, UCX_TCP_RX_SEG_SIZE=256k, "
        "UCX_TCP_TX_SEG_SIZE=256k (the default of twopool), UCX_TLS=tcp"
    )


def test_names_of_a_listing_are_its_settings_and_what_they_inherit_from() -> None:
    assert names_in(LISTING) == {"UCX_RC_VERBS_SL", "UCX_RC_SL", "UCX_IB_SL", "UCX_TLS"}
