"""Which of the two keeps an engine's names: by what this form of the package is quick with.

Compiled, the packed table takes as long as the dicts and a fifth of their memory; interpreted it is
thirty times slower. Both do the same: the tests of the index run with either.
"""

from lean_selector.core.compiled import IS_COMPILED
from lean_selector.core.index.engine_hashes import EngineHashes
from lean_selector.core.index.hashes_in_dicts import HashesInDicts


def engine_hashes() -> EngineHashes:
    """Names for a rank that holds nothing yet."""
    if not IS_COMPILED:
        return HashesInDicts()
    # Not at the top: it needs what the compiled form alone depends on.
    from lean_selector.core.index.hashes_packed import (  # pragma: no cover: compiled only
        HashesPacked,
    )

    return HashesPacked()  # pragma: no cover: in the compiled form, whose coverage nobody counts
