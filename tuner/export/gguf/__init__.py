"""A checkpoint or a Hugging Face directory as a GGUF file, which llama.cpp itself has answered from before it appears.

No other command imports this package; `gguf` and `xllamacpp` are loaded where it is used.
"""
