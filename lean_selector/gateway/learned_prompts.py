"""Remembers the block hashes of prompts, so that a prompt that was seen before needs no tokenizer.

A prefix is the first messages of a prompt; its last message may be incomplete. Each prefix has a
key, computed from JSON values (`prompt_values.py`), not from text. An entry per key refers to the
block hashes of a prompt with this prefix. If a prompt continues an earlier prompt, entries of both
prompts refer to the hashes of the longer prompt. The number of blocks of a prefix is first
estimated. When a second prompt has this prefix, the blocks that both prompts share are counted."""

from bisect import bisect_left
from collections import OrderedDict
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from lean_selector.core.hashing import any_local_hashes, hash_seed
from lean_selector.gateway.model_request import ModelRequest
from lean_selector.gateway.prompt_shapes import Served
from lean_selector.gateway.prompt_values import LINK_BYTES, links_of, rendering_key


class Chain:
    """The keys of a prompt's prefixes. `keys[n]` is the key of the first `ends[n]` bytes of the
    prompt's JSON. The shortest prefix is the request's tools (0 bytes if it has no tools)."""

    __slots__ = ("block_size", "ends", "is_eagle", "keys", "model", "seed")

    def __init__(self, served: Served, lora_name: str | None, request: ModelRequest) -> None:
        self.seed: Final = hash_seed(lora_name, request.salt)  # of the block hashes
        self.block_size: Final = served.block_size
        self.is_eagle: Final = served.is_eagle
        self.model: Final = model_key(served, lora_name)
        shape = (self.model, request.kind, self.block_size, self.is_eagle)
        key = rendering_key(request, shape, self.seed)
        end = request.tools_bytes
        self.keys = [key]
        self.ends = [end]
        for links in links_of(request):
            ends = end + links.size
            for at in range(0, len(links.hashes), 8):
                key = xxh3_64_intdigest(links.hashes[at : at + 8], key)
                end = min(end + LINK_BYTES, ends)
                self.keys.append(key)
                self.ends.append(end)

    @property
    def size(self) -> int:
        """The length of the whole prompt as compact JSON, in bytes."""
        return self.ends[-1]


def model_key(served: Served, lora_name: str | None) -> str:
    """Return a text that identifies a model, or a LoRA adapter of a base model."""
    return f"{served.model_name}\0{lora_name or ''}"


# Memory of an entry without its hashes, measured with tracemalloc on 64-bit Python 3.11.
ENTRY_BYTES: Final = 344
_TOKENS_PER_BYTE: Final = 0.25  # default until a prompt is known
_DEFAULT_BYTES: Final = 2048.0  # the default counts like a prompt of so many bytes
_MOST_BYTES: Final = 16384.0  # a longer prompt counts like one of so many bytes
_MOST_SUM: Final = 16 * _MOST_BYTES**2  # of squares; from then on, older prompts count half
_TEMPLATE_TOKENS: Final = 4096  # that a chat template may add to a prompt
_OUTPUT_TOKENS: Final = 128.0  # default until an answer's length is known
_MOST_TIMES: Final = 4.0  # the average; a longer answer counts as one of so many times it
_WEIGHT: Final = 0.25  # weight of the newest value
_MOST_TAIL_BLOCKS: Final = 64
_MOST_MODELS: Final = 1024  # models and adapters with averages


class _Run:
    """The block hashes of a prompt followed by its output, 8 bytes each."""

    __slots__ = ("hashes", "users")

    def __init__(self, hashes: bytes) -> None:
        self.hashes = hashes
        self.users = 0  # entries that refer to it


class _Entry:
    """A stored prefix. `run` has the block hashes of a prompt that begins with this prefix."""

    __slots__ = ("asked", "is_guess", "run", "shared", "tail", "tokens")

    def __init__(self, run: _Run, shared: int, tokens: int) -> None:
        self.run = run
        self.shared = shared  # blocks that all prompts with this prefix share
        self.is_guess = True  # `shared` is an upper bound: no prompt has diverged here yet
        self.tokens = tokens  # of this prefix; estimated unless the engine reported it
        self.asked = -1  # blocks of this prefix as a whole prompt; -1: it never was one
        self.tail = b""  # the last of these blocks, if `run` has others in their place

    def whole(self) -> bytes:
        """Return this prefix's block hashes. Requires that the prefix was once a whole prompt."""
        return self.run.hashes[: 8 * self.asked - len(self.tail)] + self.tail


class Averages:
    """Averages over a model's requests, used to estimate the model's next request. No single
    request changes them much, whatever its engine reports.

    Tokens per byte are a ratio of sums, in which a prompt counts by its bytes: the mean of ratios
    would follow many short prompts, whose tokens are mostly those that the chat template adds."""

    __slots__ = ("_bytes", "_tokens", "answers_hold", "output_tokens")

    def __init__(self) -> None:
        self._bytes = _DEFAULT_BYTES**2  # sum of bytes * bytes
        self._tokens = self._bytes * _TOKENS_PER_BYTE  # sum of tokens * bytes
        self.output_tokens = _OUTPUT_TOKENS
        self.answers_hold = 1.0  # share of prompts that continued with exactly the answer's tokens

    @property
    def tokens_per_byte(self) -> float:
        return self._tokens / self._bytes

    def had(self, prompt_bytes: int, prompt_tokens: int, output_tokens: int | None) -> None:
        """Adds a request to the averages. If `prompt_bytes` is 0, tokens per byte do not change."""
        # A token of the prompt has at least a byte; the others are the template's.
        if prompt_bytes and prompt_tokens <= prompt_bytes + _TEMPLATE_TOKENS:
            size = min(float(prompt_bytes), _MOST_BYTES)
            self._bytes += size * size
            self._tokens += size * size * min(1.0, prompt_tokens / prompt_bytes)
            if self._bytes > _MOST_SUM:
                self._bytes /= 2.0
                self._tokens /= 2.0
        if output_tokens is not None:
            most = _MOST_TIMES * max(self.output_tokens, _OUTPUT_TOKENS)
            self.output_tokens += _WEIGHT * (min(output_tokens, most) - self.output_tokens)


class Known(NamedTuple):
    """What is known of a prompt. `hashes`: 8 bytes per block of its longest known prefix."""

    hashes: bytes
    tokens: int  # of the whole prompt; an estimate unless `is_whole`
    unknown_bytes: int  # of the prompt as compact JSON
    is_whole: bool


class PromptMemory:
    """Block hashes of prompts, by prefix, with a memory limit. The least recently used prefix is
    dropped first; the prefixes of one prompt are dropped from the longest to the shortest."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes: Final = most_bytes
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._averages: OrderedDict[str, Averages] = OrderedDict()
        self._hash_bytes = 0

    @property
    def used_bytes(self) -> int:
        """The approximate memory in use, in bytes."""
        return self._hash_bytes + len(self._entries) * ENTRY_BYTES

    def find(self, chain: Chain) -> Known:
        """Return the block hashes of the longest prefix seen before, and the prompt's length."""
        at, entry = self._deepest(chain)
        averages = self.averages(chain.model)
        if entry is None:
            tokens = round(chain.size * averages.tokens_per_byte)
            return Known(b"", max(1, tokens), chain.size, False)
        self._touch(chain, at)
        unknown_bytes = chain.size - chain.ends[at]
        if not unknown_bytes and entry.asked >= 0:
            return Known(entry.whole(), entry.tokens, 0, True)
        tokens = entry.tokens + round(unknown_bytes * averages.tokens_per_byte)
        hashes = entry.run.hashes[: 8 * entry.shared]
        tokens = max(tokens, len(hashes) // 8 * chain.block_size, 1)
        return Known(hashes, tokens, unknown_bytes, False)

    def learn(self, chain: Chain, prompt: bytes, output: bytes = b"") -> bytes:
        """Stores the block hashes of a prompt and its output, given as tokens of 4 bytes each.

        Return the prompt's block hashes, 8 bytes each. The conversation's next prompt is expected
        to contain the output's blocks, if that was usual in other conversations with this model."""
        size, seed, is_eagle = chain.block_size, chain.seed, chain.is_eagle
        run = _Run(any_local_hashes(prompt + output, size, seed, None, is_eagle))
        tokens = len(prompt) // 4
        asked = max(0, tokens - is_eagle) // size
        averages = self.averages(chain.model)
        at, entry = self._deepest(chain)
        known_tokens, known_end = 0, 0
        if entry is not None:
            common = _common_blocks(entry.run.hashes, run.hashes)
            if at < len(chain.keys) - 1:
                self._part(entry, common, averages)
            known_tokens, known_end = entry.tokens, chain.ends[at]
            self._repoint(chain, at, entry.run, run, common)
        self._guess_between(chain, at, run, (known_tokens, known_end), (tokens, asked))
        self._end(chain, run, asked, tokens, averages)
        averages.had(chain.size, tokens, None)
        self._touch(chain, len(chain.keys) - 1)
        self._forget()
        return run.hashes[: 8 * asked]

    # -- entries -----------------------------------------------------------------------------------

    def _deepest(self, chain: Chain) -> tuple[int, _Entry | None]:
        """Return index and entry of the longest prefix that was seen before, or (-1, None)."""
        for at in range(len(chain.keys) - 1, -1, -1):
            entry = self._entries.get(chain.keys[at])
            if entry is not None:
                return at, entry
        return -1, None

    def _part(self, entry: _Entry, common: int, averages: Averages) -> None:
        """Records that another prompt shares exactly the first `common` blocks of this entry."""
        if entry.is_guess and entry.asked >= 0:
            longest = len(entry.run.hashes) // 8
            own = longest - entry.asked  # blocks that contain tokens of the answer
            if own:
                # The last token of an answer often differs, and with it one block.
                holds = common >= longest - (own > 1)
                averages.answers_hold += _WEIGHT * (holds - averages.answers_hold)
        entry.shared = common if entry.is_guess else min(entry.shared, common)
        entry.is_guess = False

    def _repoint(self, chain: Chain, at: int, old: _Run, new: _Run, common: int) -> None:
        """Makes the entries of prefixes 0 to `at` refer to `new`, not `old`. Both start with the
        same `common` blocks. The entry of an earlier whole prompt keeps its last blocks if `new`
        lacks them: chat templates may render a prompt's end differently if messages follow."""
        for key in chain.keys[: at + 1]:
            entry = self._entries.get(key)
            if entry is None or entry.run is not old or entry.shared > common:
                continue
            own = entry.asked - len(entry.tail) // 8 - common
            if own > _MOST_TAIL_BLOCKS:
                continue
            if own > 0:
                self._end_with(entry, old.hashes[8 * common : 8 * (common + own)] + entry.tail)
            self._point(entry, new)

    def _end_with(self, entry: _Entry, tail: bytes) -> None:
        self._hash_bytes += len(tail) - len(entry.tail)
        entry.tail = tail

    def _guess_between(
        self,
        chain: Chain,
        at: int,
        run: _Run,
        known: tuple[int, int],
        whole: tuple[int, int],
    ) -> None:
        """Adds entries, with estimated sizes, for the prefixes between number `at` and the last.
        `known`: (tokens, bytes) of prefix `at`. `whole`: (tokens, blocks) of the whole prompt."""
        known_tokens, known_end = known
        tokens, asked = whole
        more_bytes = max(1, chain.size - known_end)
        per_byte = max(0, tokens - known_tokens) / more_bytes
        for key, end in zip(chain.keys[at + 1 : -1], chain.ends[at + 1 : -1], strict=True):
            here = known_tokens + int((end - known_end) * per_byte)
            entry = _Entry(run, min(here // chain.block_size, asked), here)
            self._add(key, entry)

    def _end(self, chain: Chain, run: _Run, asked: int, tokens: int, averages: Averages) -> None:
        """Adds or updates the entry of the whole prompt, which has `asked` blocks."""
        blocks = len(run.hashes) // 8
        shared = blocks if averages.answers_hold >= 0.5 else asked
        entry = self._entries.get(chain.keys[-1])
        if entry is None:
            entry = _Entry(run, shared, tokens)
            self._add(chain.keys[-1], entry)
        elif entry.is_guess:
            entry.shared = shared
            self._point(entry, run)
        elif max(entry.shared, asked) <= _common_blocks(entry.run.hashes, run.hashes):
            pass  # prompts that continued are a better source for further ones
        else:
            entry.shared = min(entry.shared, asked)
            self._point(entry, run)
        self._end_with(entry, b"")
        entry.asked, entry.tokens = asked, tokens

    def _add(self, key: int, entry: _Entry) -> None:
        self._entries[key] = entry
        self._use(entry.run)

    def _point(self, entry: _Entry, run: _Run) -> None:
        self._use(run)
        self._leave(entry.run)
        entry.run = run

    def _use(self, run: _Run) -> None:
        if not run.users:
            self._hash_bytes += len(run.hashes)
        run.users += 1

    def _leave(self, run: _Run) -> None:
        run.users -= 1
        if not run.users:
            self._hash_bytes -= len(run.hashes)

    def _touch(self, chain: Chain, at: int) -> None:
        """Marks a prompt's prefixes as used. The shortest is marked last, to be dropped last."""
        move = self._entries.move_to_end
        for key in reversed(chain.keys[: at + 1]):
            if key in self._entries:
                move(key)

    def _forget(self) -> None:
        while self.used_bytes > self._most_bytes and self._entries:
            _, entry = self._entries.popitem(last=False)
            self._end_with(entry, b"")
            self._leave(entry.run)

    def averages(self, model: str) -> Averages:
        """Return the averages of a model's requests. `model` is a `model_key`."""
        averages = self._averages.get(model)
        if averages is None:
            averages = self._averages[model] = Averages()
            if len(self._averages) > _MOST_MODELS:
                self._averages.popitem(last=False)
        return averages


def _common_blocks(one: bytes, other: bytes) -> int:
    """Return the number of leading blocks that two lists of hashes share."""
    ends = range(8, min(len(one), len(other)) + 1, 8)
    return bisect_left(ends, True, key=lambda end: one[:end] != other[:end])
