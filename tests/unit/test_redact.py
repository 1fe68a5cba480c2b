"""Secrets do not get into the log, and what only sounds like one does."""

from __future__ import annotations

import argparse
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrack.writer.redact import REDACTED, redact

SECRET = "hunter2-Xyzzy-9f8e7d"  # noqa: S105  # one that nobody has


@dataclasses.dataclass
class _Login:
    user: str
    password: str


@pytest.mark.parametrize(
    "name",
    [
        *("password", "db_password", "PASSWORD", "dbPassword", "passwd", "passphrase", "mysql-pwd", "pass"),
        *("secret", "client_secret", "secrets", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "credentials"),
        *("api_key", "apikey", "apiKey", "API-KEY", "WANDB_API_KEY", "api_keys", "private_key", "ssh_key"),
        *("token", "hf_token", "HF_TOKEN", "hfToken", "auth_token", "access_token", "github_token", "bot_token"),
        *("HUGGING_FACE_HUB_TOKEN", "WANDB_TOKEN2", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
        *("Authorization", "cookie", "slack_webhook", "auth", "http.auth"),
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    """In every spelling, at every depth, and also in a command line or in pairs."""
    for config in (
        {name: SECRET},
        [[{"tracker": [{name: SECRET}]}]],
        argparse.Namespace(**{name: SECRET}),
    ):
        text = json.dumps(redact(config))
        assert SECRET not in text
        assert name in text
        assert REDACTED in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tokens", 10**15), ("max_tokens", 4096), ("num_tokens", 1), ("token_budget", 2**40), ("n_tokens", "1T")),
        *(("tokenizer", "gpt2"), ("tokenizer_path", "/data/tok.json"), ("tokens_per_step", 4_194_304)),
        *(("pad_token_id", 0), ("pad_token", "<pad>"), ("bos_token", "BOS"), ("mask_token", "[MASK]")),
        *(("image_token", "<image>"), ("special_tokens", ["<a>", "<b>"]), ("tokens_seen", 5), ("token", 7)),
        *(("user_token", "<|user|>"), ("num_key_value_heads", 8), ("key_dim", 64), ("keys", ["a", "b"])),
        *(("key", "value"), ("use_auth_token", True), ("password", None), ("password", ""), ("PWD", "/home/me")),
        *(("author", "me"), ("pass", 2), ("cost_per_token", "a"), ("loss_per_token", 0.5), ("passes", "two")),
        *(("tokens_note", "max_tokens=4096 tokens: 3 per token: 0.5"), ("path", "s3://bucket/a@v2")),
        *(("url", "https://host:8080/@user"), ("image", "docker://repo/image:tag@sha256:0abc")),
        *(("git", "ssh://git@github.com/a/b"), ("time", "12:30:00"), ("cmd", ["--max-tokens", "4096"])),
        ("nested", {"auth": {"method": "none"}}),
    ],
)
def test_what_only_sounds_like_a_secret_is_kept(name: str, value: object) -> None:
    """A tokenizer's tokens are what this log is about."""
    assert redact({name: value}) == {name: value}


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{SECRET}@host/path",
        f"postgresql://me:{SECRET}/with@slash@host:5432/db",
        f"https://{SECRET}@github.com/a/b",
        f"redis://:{SECRET}@cache:6379",
        f"https://host/path?x=1&token={SECRET}&y=2",
        f"url=https://host/?api_key={SECRET}",
        f"train.py --lr 0.1 --api-key {SECRET} --steps 3",
        f"train.py --hf-token={SECRET}",
        f"WANDB_API_KEY={SECRET} python train.py",
        f'{{"lr": 1, "password": "{SECRET} and more"}}',
        f"Authorization: Basic {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"X-Api-Key: {SECRET}",
        f"curl -H 'Authorization: Bearer {SECRET}'",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"AccountName=a;AccountKey={SECRET};EndpointSuffix=b",
    ],
)
def test_a_secret_inside_a_text_is_replaced(text: str) -> None:
    """Command lines, URLs, connection strings, headers."""
    redacted = json.dumps(redact({"a": [text]}))
    assert SECRET not in redacted
    assert REDACTED in redacted


@pytest.mark.parametrize(
    "form",
    [
        "hf_" + "aB3" * 8,
        "sk-proj-" + "a1B2" * 6,
        "ghp_" + "aB3" * 12,
        "github_pat_" + "aB3" * 10,
        "glpat-" + "aB3" * 7,
        "xoxb-1234567890-abcdef",
        "AKIA" + "ABCD1234EFGH5678",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
    ],
)
def test_a_token_of_a_common_service_is_known_by_its_form(form: str) -> None:
    """Whatever it is called, also in the middle of a text and as a key."""
    assert form not in json.dumps(redact({"x": form, "y": [f"login {form} ok"], form: 1}))


def test_command_lines_pairs_and_named_values_are_understood() -> None:
    """The name of a secret may stand beside it."""
    assert redact(["--api-key", SECRET, "--lr", "0.1"]) == ["--api-key", REDACTED, "--lr", "0.1"]
    assert redact(["--hf-token", "--lr", "0.1"]) == ["--hf-token", "--lr", "0.1"]
    assert redact([("WANDB_API_KEY", SECRET)]) == [["WANDB_API_KEY", REDACTED]]
    assert redact({"env": [{"name": "HF_TOKEN", "value": SECRET}]}) == {
        "env": [{"name": "HF_TOKEN", "value": REDACTED}]
    }
    assert redact({"key": "0123456789abcdef0123456789abcdef01234567"}) == {"key": REDACTED}
    assert redact(_Login("me", SECRET)) == {"user": "me", "password": REDACTED}


def test_what_else_stands_in_the_text_is_kept() -> None:
    """A person still reads which host and which options."""
    assert redact(f"https://me:{SECRET}@host/path") == f"https://{REDACTED}@host/path"
    assert redact(f"--api-key {SECRET} --lr 0.1") == f"--api-key {REDACTED} --lr 0.1"
    assert redact(f"https://host/?token={SECRET}&y=2") == f"https://host/?token={REDACTED}&y=2"


_NAMES = st.sampled_from(["password", "api_key", "hf_token", "clientSecret", "AWS-SECRET-KEY", "credentials"])
_HARMLESS = st.text(st.characters(codec="ascii", categories=["L"]), max_size=8)


@given(
    st.recursive(
        st.dictionaries(_NAMES, st.just(SECRET) | st.lists(st.just(SECRET)), min_size=1),
        lambda inner: st.lists(inner) | st.dictionaries(_HARMLESS, inner) | st.tuples(inner, inner),
    )
)
def test_no_nesting_hides_a_secret(config: object) -> None:
    """And what was redacted stays as it is."""
    once = redact(config)
    assert SECRET not in json.dumps(once)
    assert redact(once) == once


@given(st.text(alphabet=st.sampled_from("ab-:=@/?&. \"'hf_tokenpassword"), max_size=200))
def test_redaction_ends_and_says_a_thing_once(text: str) -> None:
    """Whatever the text."""
    once = redact(text)
    assert redact(once) == once
