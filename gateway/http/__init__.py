"""OpenAI-shaped HTTP.

requests: what was asked, as generations · play: running them while the client is there · forms, errors: the shapes
of answers · app: the endpoints · core: what they need of the gateway behind them.
"""
