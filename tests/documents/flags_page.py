"""docs/reference/flags.md: every flag of the services, made of the classes that declare them.

`python -m tests.documents.flags_page` writes it anew; a test holds it against them.
"""

from typing import Any, Final

from lean_selector.app.flags import Field, fields_of
from lean_selector.app.gateway_flags import GatewayConfig
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.app.service_flags import TrackerConfig
from tests.documents.pages import ROOT

PAGE: Final = "docs/reference/flags.md"
_GUIDES: Final = {
    "Listening, logging and stopping": "[operations](../guide/operations.md), "
    "[TLS](../guide/tls.md), [access](../guide/access.md)",
    "State across restarts": "[restarts](../guide/restarts.md)",
    "Replicas": "[replicas](../guide/replicas.md)",
    "Encryption of replica sync": "[replicas](../guide/replicas.md#keys)",
    "Discovery": "[discovery](../guide/discovery.md)",
    "Requests to replicas and index peers": "[TLS](../guide/tls.md#what-we-ask-of-others)",
    "Allowed endpoints": "[operations](../guide/operations.md#where-it-connects-to)",
    "API version": "[the 1.6 dialect](http-api-16.md)",
    "Choosing a worker": "[choosing](../guide/choosing.md)",
    "Queueing": "[choosing](../guide/choosing.md#who-waits)",
    "Load shedding": "[load shedding](../guide/load-shedding.md)",
    "Sessions": "[sessions](../guide/sessions.md)",
    "Discovery of workers": "[discovery](../guide/discovery.md)",
    "Outlier detection and health checks": "[health](../guide/health.md)",
    "Raw prompts": "[prompts](../guide/prompts.md), [gateways](../guide/gateways.md)",
    "Gateways' access logs": "[gateways](../guide/gateways.md#ends)",
    "Decision log": "[choosing](../guide/choosing.md#your-own-traffic)",
    "The gateway": "[the gateway](../guide/gateway.md)",
}
_INTRO: Final = """\
# Flags

The flags of `lean-selector`, `lean-slot-tracker` and `lean-selector gateway`. This page is
generated from the flags' declarations by `.venv/bin/python -m tests.documents.flags_page`; a test
fails when it is out of date. `--help` shows the most used flags, `--help-all` all of them.

A flag takes precedence over its environment variable, that over the file of `--config`, that over
the default. An empty variable counts as unset. `--config FILE` names a TOML file with the same
names without `--`:

```toml
port = 8092
use-kv-events = false
replica-sync-port = 9092
replica-sync-peers = ["tcp://selector-b:9092"]
```

A name that is no flag, and a value that cannot be read or is out of range, stop the start with one
line and status 2 ([D15](../decisions.md#d15-a-bad-setting-stops-the-start)).
"""
_HEAD: Final = "| flag | environment | default | meaning |\n|---|---|---|---|"


def page() -> str:
    """The whole text."""
    parts, known = [_INTRO], dict[str, Field]()
    for title, config, intro in (
        ("All services", TrackerConfig, "The default of `--port` is 8091 for the slot tracker, 8092"
         " for the selector, 8080 for the gateway."),
        ("Selector and gateway", SelectorConfig, ""),
        ("Gateway", GatewayConfig, "It takes all flags above; where it has a default of its own, "
         "the flag is here again.\nWorkers are named as arguments, or as `workers` in the file."),
    ):  # fmt: skip
        parts += [f"## {title}\n", *([f"{intro}\n"] if intro else []), *_groups(config, known)]
    return "\n".join(parts).rstrip("\n") + "\n"


def _groups(config: Any, known: dict[str, Field]) -> list[str]:
    """The groups with flags that were not on the page, or are otherwise here."""
    lines, last = list[str](), ""
    for each in fields_of(config):
        name, before = each.flag.name, known.get(each.flag.name)
        if not name.startswith("--") or (before is not None and _same(before, each)):
            continue
        known[name] = each
        if each.title != last:
            guide = _GUIDES.get(each.title)
            lines.append(f"| **{each.title}** | | | {f'more: {guide}' if guide else ''} |")
            last = each.title
        env = ", ".join(f"`{variable}`" for variable in each.flag.env)
        meaning = each.help.replace("|", "\\|")
        words = "" if "|" not in each.metavar else f" ({each.metavar.replace('|', ', ')})"
        lines.append(f"| `{name}` | {env} | {each.shown_default} | {meaning}{words} |")
    return [_HEAD, *lines, ""]


def _same(one: Field, other: Field) -> bool:
    is_port = one.flag.name == "--port"
    return is_port or (one.help, one.default) == (other.help, other.default)


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page(), encoding="utf-8")
