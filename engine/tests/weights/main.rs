//! Sources of weights: GGUF files and Hugging Face folders, read right or refused by name.

mod gguf;
mod quant;
mod support;
