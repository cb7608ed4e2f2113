"""Selection services under the same load, in turns: what `loadtest/versus.py` is made of.

`targets` starts and measures the services, `prompts` and `engines` make what they are given,
`results` drives them by `client` and keeps the figures, `stages` and `index_stages` say which cases
there are, `report` says how it ended.
"""
