"""Scenes of rules that no race touches: one for each sentence of the wire that would otherwise be taken on trust.

The one rule: as for races; what is looked at is named by the sentence that it proves.
"""
