//! Sources of weights: GGUF files and Hugging Face folders, read right or refused by name.

mod begin_token;
mod deepseek;
mod families;
mod folder;
mod gguf;
mod huggingface;
mod phi3;
mod quant;
mod quantized;
mod qwen3_5;
mod support;
mod value_heads;
