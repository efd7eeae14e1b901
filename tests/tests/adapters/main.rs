//! LoRA adapters through the split: every answer has the bits of one engine that has this adapter alone.

mod answers;
mod folder;
mod many;
mod setup;
mod workers;
