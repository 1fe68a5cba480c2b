"""Keep passwords, keys and tokens out of the log, and leave max_tokens, tokenizers and pad tokens alone."""

from __future__ import annotations

import re
from typing import Final

from .plain import Json, plain

REDACTED: Final = "[redacted]"

# Looked for in a name without its separators: api_key, apiKey, X-API-KEY and MYAPIKEY are one.
_SECRET: Final = re.compile(
    "password|passwd|passphrase|secret|credential|authorization|cookie|webhook|connectionstring|sharedaccesssignature|"
    "xamzsignature|(?:api|access|private|signing|encryption|account|storage|ssh|deploy|license|subscription)key|"
    "(?:api|access|auth|refresh|bearer|session|security)token"
)
_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# What stands before "token" where the token is one of text; before any other word it is taken for a key.
_TEXT_TOKENS: Final = frozenset(
    "bos eos pad unk mask sep cls eot eod sos start end stop special image img audio video speech boi eoi fim prefix "  # noqa: SIM905 a list of 60 words reads better so
    "suffix middle query class latent register memory dist decoder forced extra additional added new first last next "
    "prev previous per by each loss input output target prompt max min num n bytes bits time flops cost sub".split()
)
_SPECIAL_TOKEN: Final = re.compile(r"<.*>|\[[A-Z]+[0-9]*\]|\W*")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_+/=-]*[0-9a-f]{32}[A-Za-z0-9_+/=-]*")

_KNOWN_FORMS: Final = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{20,}|gh[opusr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|wandb_v1_\w{16,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?<=\b(?i:bearer) )[\w.~+/=-]{8,}",
    re.DOTALL,
)
# Up to the last "@": a password may hold "/" and "@". A port is no password, and a digest of an image no host.
_WITH_PASSWORD: Final = re.compile(r"""(?<=://)[^\s/?#:@"']*:(?!\d{1,5}(?:[/?#\s"',]|$))[^\s"']{1,512}@(?!sha256:)""")
_WITH_USER: Final = re.compile(r"""(?<=http://|ttps://)[^\s/?#:@"']+@""")  # "git@host" of other schemes is no secret
_ASSIGNED: Final = re.compile(r"""(?<![\w.-])(?P<name>-{0,2}[A-Za-z][\w.-]*+)(?P<between>["']?\s*[=:]\s*|\s+)""")
_VALUE: Final = re.compile(
    r"""(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?:(?:Bearer|Basic|Token)\s+)?[^\s&]+""", re.IGNORECASE | re.DOTALL
)
_OPTION: Final = re.compile(r"--?[A-Za-z][\w.-]*")


def redact(config: object) -> Json:
    """Return a configuration as plain JSON values with every secret replaced; it never raises.

    A secret is known by its name (``wandb.api_key``, ``--hf-token X``, ``DB_PASSWORD=X``), wherever in nested values
    the name stands, or by its form: a password in a URL, a private key, the tokens of common services.

    Args:
        config: Anything: mappings, argparse.Namespace, dataclasses, OmegaConf, nested as they like.
    """
    return _redacted(plain(config))


def is_secret_name(name: str) -> bool:
    """Return whether what goes by this name must not be kept, whatever it is."""
    return _SECRET.search(re.sub(r"[^a-z]", "", name.lower())) is not None


def _redacted(value: Json) -> Json:
    if isinstance(value, str):
        return _redacted_text(value)
    if isinstance(value, list):
        return _redacted_list(value)
    if isinstance(value, dict):
        named = value.get("name", value.get("key"))  # {"name": "HF_TOKEN", "value": ...}, as Kubernetes has it
        result: dict[str, Json] = {}
        for key, item in value.items():
            secret = _is_secret(key, item) or (
                key.lower() == "value" and isinstance(named, str) and _is_secret(named, item)
            )
            result[_redacted_text(key)] = REDACTED if secret else _redacted(item)
        return result
    return value


def _redacted_list(values: list[Json]) -> list[Json]:
    """Return a list without its secrets, also where it is a command line or a pair of name and value."""
    result: list[Json] = []
    name = ""  # of what the next value is the value
    for value in values:
        is_value = name and not (isinstance(value, str) and _OPTION.fullmatch(value))
        result.append(REDACTED if is_value and _is_secret(name, value) else _redacted(value))
        names_next = isinstance(value, str) and (
            _OPTION.fullmatch(value) or (len(values) == 2 and is_secret_name(value))  # noqa: PLR2004  # a pair is two
        )
        name = str(value) if names_next else ""
    return result


def _is_secret(name: str, value: Json) -> bool:  # noqa: PLR0911  # a line for each kind of name
    if value is None or isinstance(value, bool) or value in ("", [], {}):
        return False  # that there is none is worth knowing
    if isinstance(value, (int, float)):
        return is_secret_name(name) and "token" not in name.lower()  # a number of tokens
    words = [word.lower() for word in _WORDS.findall(name)]
    if is_secret_name(name) or (words[-1:] == ["auth"] and not isinstance(value, dict)):
        return True
    if isinstance(value, list):
        return any(_is_secret(name, item) for item in value)
    if not words or not isinstance(value, str):
        return False
    last = words[-1]
    if last.endswith("token"):
        before = last.removesuffix("token") or (words[-2] if len(words) > 1 else "")
        return before not in _TEXT_TOKENS and not _SPECIAL_TOKEN.fullmatch(value)
    if last == "pwd":
        return not value.startswith("/")  # PWD is a folder
    if last == "key":
        return _BARE_KEY.fullmatch(value) is not None
    return words in (["pass"], ["sig"])


def _redacted_text(text: str) -> str:
    text = _KNOWN_FORMS.sub(REDACTED, text)
    if "://" in text:
        text = _WITH_USER.sub(f"{REDACTED}@", _WITH_PASSWORD.sub(f"{REDACTED}@", text))
    pieces: list[str] = []
    done = 0
    for assigned in _ASSIGNED.finditer(text):
        value = _VALUE.match(text, assigned.end())
        if assigned.start() >= done and value and _assigns_secret(assigned, value["quoted"] or value[0]):
            pieces += text[done : assigned.end()], REDACTED
            done = value.end()
    return "".join(pieces) + text[done:]


def _assigns_secret(assigned: re.Match[str], value: str) -> bool:
    name, between = assigned["name"], assigned["between"]
    if value.startswith(REDACTED) or (between.isspace() and (not name.startswith("-") or _OPTION.fullmatch(value))):
        return False  # done already, prose, an option without a value
    if between.lstrip().startswith(":") and not is_secret_name(name):
        return False  # "cost per token: 0.5"
    return _is_secret(name, value)
