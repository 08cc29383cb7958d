"""The native operators, through ctypes: `library` opens and calls them, `build` compiles them.

The one rule: pointers are checked by the library, lifetimes by nobody. Whoever passes an address keeps its memory alive
until the call returns. Nothing here needs torch; addresses are plain integers (`tensor.data_ptr()`).
"""
