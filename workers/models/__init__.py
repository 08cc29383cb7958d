"""Model families and the operators they run on.

`loader.load_model` is the one entry; everything a model needs is in its artefact directory.
"""
