//! Models known by name: the facts of their `config.json`, and their number of parameters.

use baton_types::{Attention, LayerKv, SlidingWindow};
use baton_worker::models::ModelSize;

/// Which layers attend only to a window.
#[derive(Clone, Copy)]
enum Window {
    /// All layers attend to every token.
    No,
    /// All layers attend to this many tokens.
    All(u32),
    /// Of each `1` layers the last attends to every token, the others to `0` tokens.
    AllBut(u32, u32),
}

struct Named {
    name: &'static str,
    layers: u32,
    kv: LayerKv,
    window: Window,
    parameters_millions: u64,
    context: u64,
    /// Whether the engine supports it.
    served: bool,
}

const fn heads(
    name: &'static str,
    [layers, kv_heads, head_dim]: [u32; 3],
    parameters_millions: u64,
    context: u64,
) -> Named {
    let kv = LayerKv::Heads { kv_heads, head_dim };
    Named { name, layers, kv, window: Window::No, parameters_millions, context, served: true }
}

const fn sliding(window: Window, named: Named) -> Named {
    Named { window, ..named }
}

/// With latents of DeepSeek's published sizes in place of heads.
const fn latents(named: Named) -> Named {
    Named { kv: LayerKv::Latent { dim: 512 + 64 }, ..named }
}

/// A model whose architecture the engine does not support.
const fn other(named: Named) -> Named {
    Named { served: false, ..named }
}

/// Name, layers x KV heads x elements of a head, millions of parameters, longest context.
const NAMED: &[Named] = &[
    heads("smollm2-135m", [30, 3, 64], 135, 8_192),
    heads("llama-2-7b", [32, 32, 128], 6_738, 4_096),
    heads("llama-2-70b", [80, 8, 128], 68_977, 4_096),
    heads("llama-3-8b", [32, 8, 128], 8_030, 8_192),
    heads("llama-3-70b", [80, 8, 128], 70_554, 8_192),
    heads("llama-3.1-8b", [32, 8, 128], 8_030, 131_072),
    heads("llama-3.1-70b", [80, 8, 128], 70_554, 131_072),
    heads("llama-3.1-405b", [126, 8, 128], 405_853, 131_072),
    heads("llama-3.2-1b", [16, 8, 64], 1_236, 131_072),
    heads("llama-3.2-3b", [28, 8, 128], 3_213, 131_072),
    sliding(Window::All(4_096), heads("mistral-7b-v0.1", [32, 8, 128], 7_242, 32_768)),
    heads("mistral-7b-v0.3", [32, 8, 128], 7_248, 32_768),
    heads("mixtral-8x7b", [32, 8, 128], 46_703, 32_768),
    heads("qwen2.5-7b", [28, 4, 128], 7_616, 32_768),
    heads("qwen3-8b", [36, 8, 128], 8_191, 40_960),
    sliding(Window::AllBut(4_096, 2), heads("gemma-2-9b", [42, 8, 256], 9_242, 8_192)),
    sliding(Window::AllBut(512, 6), heads("gemma-3-1b", [26, 1, 256], 1_000, 32_768)),
    sliding(Window::AllBut(128, 2), heads("gpt-oss-20b", [24, 8, 64], 20_915, 131_072)),
    sliding(Window::AllBut(128, 2), heads("gpt-oss-120b", [36, 8, 64], 116_829, 131_072)),
    other(heads("falcon-7b", [32, 1, 64], 6_922, 2_048)),
    latents(heads("deepseek-v2-lite", [27, 1, 1], 15_706, 163_840)),
    latents(heads("deepseek-v2", [60, 1, 1], 235_741, 163_840)),
    latents(heads("deepseek-v3", [61, 1, 1], 671_026, 163_840)),
];

/// The model of this name, in any case, and whether the engine supports it.
pub(super) fn find(name: &str) -> Option<(ModelSize, bool)> {
    let named = NAMED.iter().find(|named| named.name.eq_ignore_ascii_case(name))?;
    let window = match named.window {
        Window::No => None,
        Window::All(tokens) => Some(SlidingWindow { tokens, layers: (0..named.layers).collect() }),
        Window::AllBut(tokens, every) => Some(all_but(tokens, every, named.layers)),
    };
    let attention = Attention::alike(named.layers, named.kv, window.as_ref());
    let parameters = named.parameters_millions * 1_000_000;
    Some((ModelSize { attention, parameters, context: named.context }, named.served))
}

/// A window in all layers except the last of each `every`.
pub(super) fn all_but(tokens: u32, every: u32, layers: u32) -> SlidingWindow {
    SlidingWindow { tokens, layers: (0..layers).filter(|layer| !(layer + 1).is_multiple_of(every)).collect() }
}

/// All names, for messages.
pub(super) fn names() -> String {
    NAMED.iter().map(|named| named.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{Dtype, KvLayout};

    const KIB: u64 = 1 << 10;

    fn layout(name: &str) -> KvLayout {
        find(name).unwrap().0.attention.layout(16, Dtype::Bf16).unwrap()
    }

    /// Bytes of a token, and of a sequence of 32,768 tokens with blocks of 16.
    fn sizes(name: &str) -> (u64, u64) {
        let layout = layout(name);
        (layout.bytes_per_token() as u64, layout.sequence_bytes(32_768).unwrap())
    }

    #[test]
    fn grouped_queries() {
        // 2 (k and v) * layers * 8 KV heads * 128 elements * 2 bytes = layers * 4 KiB.
        assert_eq!(sizes("llama-3-8b"), (128 * KIB, 32_768 * 128 * KIB));
        assert_eq!(sizes("Llama-3-70B"), (320 * KIB, 32_768 * 320 * KIB));
        assert_eq!(sizes("Llama-3.1-405B"), (504 * KIB, 32_768 * 504 * KIB));
        // 2 * 30 layers * 3 heads * 64 elements * 2 bytes.
        assert_eq!(sizes("smollm2-135m").0, 23_040);
    }

    #[test]
    fn multi_head() {
        // Llama-2-7B has as many KV heads as query heads: 2 * 32 layers * 32 heads * 128 elements * 2 bytes.
        assert_eq!(sizes("llama-2-7b").0, 512 * KIB);
    }

    #[test]
    fn multi_query() {
        // Falcon-7B: 71 query heads of 64 elements share one: 2 * 32 layers * 1 head * 64 elements * 2 bytes.
        assert_eq!(sizes("falcon-7b").0, 8 * KIB);
    }

    #[test]
    fn sliding_windows() {
        // Mistral-7B-v0.1: 128 KiB a token like Llama-3-8B, but at most 4,096 tokens, which are 256 blocks, and one more because a window
        // may begin within a block: 257 * 16 * 128 KiB = 514 MiB for any longer context.
        assert_eq!(sizes("mistral-7b-v0.1"), (128 * KIB, 514 * KIB * KIB));
        // Gemma-2-9B: 2 * 8 heads * 256 elements * 2 bytes = 8 KiB a layer; 21 of its 42 layers attend to 4,096 tokens (257 blocks), 21
        // to all of the 2,048 blocks: 21 * 8 KiB * 16 * (257 + 2,048).
        assert_eq!(sizes("gemma-2-9b"), (42 * 8 * KIB, 21 * 8 * KIB * 16 * (257 + 2_048)));
        // gpt-oss-20b: 2 * 8 heads * 64 elements * 2 bytes = 2 KiB a layer; 12 of its 24 layers attend to 128 tokens (9 blocks).
        assert_eq!(sizes("gpt-oss-20b"), (24 * 2 * KIB, 12 * 2 * KIB * 16 * (9 + 2_048)));
        // Gemma-3-1B: 2 * 1 head * 256 * 2 bytes = 1 KiB a layer; layers 5, 11, 17 and 23 attend to every token, the other 22 to 512
        // tokens.
        assert_eq!(sizes("gemma-3-1b"), (26 * KIB, 16 * KIB * (22 * 33 + 4 * 2_048)));
    }

    #[test]
    fn latent() {
        // DeepSeek-V3: 61 layers of a latent of 512 and 64 rotated elements, 2 bytes each, no k and v and no heads.
        assert_eq!(sizes("deepseek-v3").0, 61 * (512 + 64) * 2);
        assert_eq!(sizes("deepseek-v3").0, 70_272);
    }

    #[test]
    fn every_name_is_found_and_has_a_layout() {
        for named in NAMED {
            assert!(layout(named.name).bytes_per_token() > 0, "{}", named.name);
            assert!(NAMED.iter().filter(|other| other.name == named.name).count() == 1, "{}", named.name);
        }
        let served = |name| find(name).unwrap().1;
        assert!(
            served("llama-3-8b")
                && served("mistral-7b-v0.1")
                && served("gemma-2-9b")
                && served("gpt-oss-20b")
                && served("deepseek-v3")
                && !served("falcon-7b")
        );
        assert!(find("llama-9").is_none() && names().contains("deepseek-v3"));
    }
}
