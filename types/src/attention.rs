//! Which KV attention stores per token, and the KV layout that follows from it.

use crate::{Dtype, GroupKind, KvGroup, KvLayout, KvPlane, LayoutError};

/// What one layer stores per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKv {
    /// A key and a value for each KV head. Multi-head attention has as many KV heads as query heads, multi-query attention has one, and
    /// grouped-query attention has a number in between.
    Heads {
        /// Number of KV heads.
        kv_heads: u32,
        /// Elements of a key, and of a value.
        head_dim: u32,
    },
    /// One vector shared by all heads: the compressed keys and values, and the rotated part of the key (MLA).
    Latent {
        /// Elements: rank of the compression and rotated dimensions together.
        dim: u32,
    },
}

/// Layers that attend to a bounded number of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Tokens in the window, including the newest.
    pub tokens: u32,
    /// The layers with a window, ascending. All other layers attend to every token.
    pub layers: Vec<u32>,
}

/// The properties of a model's attention that decide the size of its KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Layers that store KV.
    pub layers: u32,
    /// What each of them stores per token.
    pub kv: TokenKv,
    /// Layers with a window, by window. No layer has two.
    pub windows: Vec<SlidingWindow>,
}

impl Attention {
    /// The layout with this block size and element type. Layers that attend to every token form one group, and those of each window another.
    pub fn layout(&self, block_tokens: u32, dtype: Dtype) -> Result<KvLayout, LayoutError> {
        let (whole, planes) = match self.kv {
            TokenKv::Heads { kv_heads, head_dim } => {
                let plane = |name| KvPlane::try_new(name, kv_heads, head_dim, dtype);
                (GroupKind::Full, vec![plane("k")?, plane("v")?])
            }
            TokenKv::Latent { dim } => (GroupKind::Latent, vec![KvPlane::try_new("latent", 1, dim, dtype)?]),
        };
        let has_window = |layer: &u32| self.windows.iter().any(|window| window.layers.contains(layer));
        let mut groups = Vec::new();
        let layers: Vec<u32> = (0..self.layers).filter(|layer| !has_window(layer)).collect();
        if !layers.is_empty() {
            groups.push(KvGroup { kind: whole, layers, planes: planes.clone() });
        }
        for SlidingWindow { tokens, layers } in self.windows.clone() {
            groups.push(KvGroup { kind: GroupKind::Window(tokens), layers, planes: planes.clone() });
        }
        KvLayout::try_new(block_tokens, groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_with_a_window_form_a_group_of_their_own() {
        let heads = TokenKv::Heads { kv_heads: 2, head_dim: 8 };
        let attention = |layers: &[u32]| Attention {
            layers: 4,
            kv: heads,
            windows: vec![SlidingWindow { tokens: 64, layers: layers.to_vec() }],
        };
        let groups = |a: Attention| {
            let layout = a.layout(16, Dtype::Bf16).unwrap();
            layout.groups().iter().map(|g| (g.kind, g.layers.clone())).collect::<Vec<_>>()
        };
        let (full, window) = (GroupKind::Full, GroupKind::Window(64));
        assert_eq!(groups(attention(&[0, 2])), [(full, vec![1, 3]), (window, vec![0, 2])]);
        assert_eq!(groups(attention(&[0, 1, 2, 3])), [(window, vec![0, 1, 2, 3])]);
        let mut two = attention(&[1]);
        two.windows.push(SlidingWindow { tokens: 8, layers: vec![0, 3] });
        assert_eq!(groups(two), [(full, vec![2]), (window, vec![1]), (GroupKind::Window(8), vec![0, 3])]);
        let plain = Attention { windows: Vec::new(), ..attention(&[]) };
        assert_eq!(plain.layout(16, Dtype::Bf16), KvLayout::llama(16, 4, 2, 8, Dtype::Bf16));
        assert!(attention(&[]).layout(16, Dtype::Bf16).is_err(), "a window without layers");
    }

    #[test]
    fn a_latent_is_one_plane_whatever_the_heads() {
        // DeepSeek-V3: rank 512 and 64 rotated dimensions, 2 bytes each, in 61 layers.
        let attention = Attention { layers: 61, kv: TokenKv::Latent { dim: 512 + 64 }, windows: Vec::new() };
        let layout = attention.layout(16, Dtype::Bf16).unwrap();
        assert_eq!((layout.groups()[0].kind, layout.groups()[0].planes.len()), (GroupKind::Latent, 1));
        assert_eq!(layout.bytes_per_token(), 61 * 576 * 2);
    }
}
