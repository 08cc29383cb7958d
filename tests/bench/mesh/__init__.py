"""`make bench-mesh`: every Mesh row of the targets, measured on real processes with the latency-model engine.

One module per group of rows; each offers `measure`, which answers rows. The one rule: what the engine and the client
cost is measured and taken out, or named in the row's remark.
"""
