"""What the events of a rank have taught, beside what it holds."""

from collections import OrderedDict

import msgspec

from lean_selector.core.index.kv_index import Tier


class Taught(msgspec.Struct):
    """What the events of one rank have taught."""

    is_prefix_group: dict[int, bool]  # group_idx -> its blocks count
    # block hash -> salt, oldest first, for salted blocks that are held
    salts: dict[Tier, OrderedDict[int, str]]
