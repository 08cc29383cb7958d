"""The CUDA operators, through ctypes: `build` compiles them, `library` opens and calls them, the rest are the calls.

The one rule: arguments are device addresses as plain integers (`tensor.data_ptr()`), counts, and a stream
(`torch.cuda.current_stream().cuda_stream`); whoever passes an address keeps its memory alive until the stream has run
the call. Nothing here needs torch.
"""
