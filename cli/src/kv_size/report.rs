//! The sizes as a table and as JSON.

use crate::stdout::grouped;
use baton_types::{GroupKind, KvLayout, PoolDemand};
use serde_json::{Value, json};

/// Units of sizes that people read.
const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// The sizes of one model.
pub(super) struct Report {
    pub(super) model: String,
    pub(super) layout: KvLayout,
    /// Bytes of the weights, if known.
    pub(super) weights_bytes: Option<u64>,
    /// Bytes for KV, if given.
    pub(super) memory: Option<u64>,
    /// How a worker divides it over the groups.
    pub(super) demand: PoolDemand,
    /// Context lengths in tokens.
    pub(super) contexts: Vec<u64>,
    /// Why the engine does not serve the model.
    pub(super) refused: Option<String>,
}

impl Report {
    /// Blocks of each group.
    fn blocks(&self) -> Option<Vec<u32>> {
        self.memory.map(|memory| self.layout.divide(memory, &self.demand))
    }

    /// For scripts: unknown values are null.
    pub(super) fn json(&self) -> Value {
        let layout = &self.layout;
        let blocks = self.blocks();
        let groups = layout.groups().iter().enumerate().map(|(index, g)| {
            let bytes = g.layers.len() * g.token_bytes();
            let (per_token, per_state) = if g.kind.is_by_position() { (bytes, None) } else { (0, Some(bytes)) };
            json!({"kind": kind(g.kind), "layers": g.layers.len(), "bytes_per_token": per_token,
                "bytes_per_state": per_state, "blocks": blocks.as_ref().map(|blocks| blocks[index])})
        });
        let context = |&tokens: &u64| {
            json!({"tokens": tokens, "bytes": layout.sequence_bytes(tokens),
                "sequences": self.memory.map(|memory| layout.sequences_in(memory, tokens))})
        };
        json!({
            "model": self.model, "block_tokens": layout.block_tokens(), "kv": layout.groups()[0].planes[0].dtype().name(),
            "bytes_per_token": layout.bytes_per_token(), "bytes_per_block": layout.bytes_per_block(),
            "groups": groups.collect::<Vec<_>>(),
            "weights_bytes": self.weights_bytes, "kv_bytes": self.memory,
            "blocks": blocks.map(|blocks| blocks.into_iter().map(u64::from).sum::<u64>()),
            "contexts": self.contexts.iter().map(context).collect::<Vec<_>>(),
            "refused": self.refused,
        })
    }

    /// The report as text for people.
    pub(super) fn table(&self) -> String {
        let layout = &self.layout;
        let mut lines = vec![
            format!("{}: {} of KV per token", self.model, size(layout.bytes_per_token() as u64)),
            format!("Layout: {layout}"),
        ];
        if let Some(weights) = self.weights_bytes {
            lines.push(format!("Weights: {}", size(weights)));
        }
        if let (Some(memory), Some(blocks)) = (self.memory, self.blocks()) {
            let all = blocks.iter().copied().map(u64::from).sum();
            lines.push(format!("Memory for KV: {}, {} blocks", size(memory), grouped(all)));
            let groups = layout.groups().iter().zip(&blocks).filter(|_| blocks.len() > 1);
            lines.extend(groups.map(|(group, blocks)| {
                let bytes = size(group.block_bytes(layout.block_tokens()) as u64);
                format!("  {}: {} blocks of {bytes}", kind_name(group.kind), grouped(u64::from(*blocks)))
            }));
        }
        if let Some(refused) = &self.refused {
            lines.push(format!("The model cannot be served: {refused}"));
        }
        lines.push(String::new());
        let head = ["CONTEXT", "KV OF A SEQUENCE", "SEQUENCES"].map(str::to_owned);
        let row = |&tokens: &u64| {
            let bytes = layout.sequence_bytes(tokens).map_or_else(|| "-".into(), size);
            let sequences = self.memory.map(|memory| grouped(layout.sequences_in(memory, tokens)));
            [grouped(tokens), bytes, sequences.unwrap_or_else(|| "-".into())]
        };
        let rows = std::iter::once(head).chain(self.contexts.iter().map(row));
        lines.extend(rows.map(|[context, bytes, sequences]| format!("{context:>10}  {bytes:>16}  {sequences:>9}")));
        if self.memory.is_none() {
            lines.push("\n--memory or --gpu-memory tells how many sequences fit.".into());
        }
        lines.join("\n")
    }
}

fn kind(kind: GroupKind) -> Value {
    match kind {
        GroupKind::Full => json!("full"),
        GroupKind::Window(tokens) => json!({ "window": tokens }),
        GroupKind::Latent => json!("latent"),
        GroupKind::State => json!("state"),
    }
}

fn kind_name(kind: GroupKind) -> String {
    match kind {
        GroupKind::Full => "full".into(),
        GroupKind::Window(tokens) => format!("window of {} tokens", grouped(u64::from(tokens))),
        GroupKind::Latent => "latent".into(),
        GroupKind::State => "states".into(),
    }
}

/// A size in the largest unit that it reaches, with up to two decimals.
pub(super) fn size(bytes: u64) -> String {
    let Some((unit, factor)) = UNITS.into_iter().find(|(_, factor)| bytes >= *factor) else {
        return format!("{bytes} B");
    };
    let number = format!("{:.2}", bytes as f64 / factor as f64);
    format!("{} {unit}", number.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{Dtype, KvGroup, KvPlane};

    const DEMAND: PoolDemand = PoolDemand { sequences: 64, tokens_max: 8_192, chunk_max: 256, watermark: 4 };

    #[test]
    fn each_group_has_blocks_of_its_own() {
        let planes = || vec![KvPlane::try_new("k", 1, 8, Dtype::Bf16).unwrap()];
        let group = |kind, layer| KvGroup { kind, layers: vec![layer], planes: planes() };
        let groups = vec![group(GroupKind::Full, 0), group(GroupKind::Window(1_024), 1)];
        let report = Report {
            model: "mixed".into(),
            layout: KvLayout::try_new(16, groups).unwrap(),
            weights_bytes: None,
            memory: Some(1 << 30),
            demand: DEMAND,
            contexts: vec![8_192],
            refused: None,
        };
        // 1,023 / 16 + 1 = 65 blocks of a window, for 64 sequences; a quarter for cached prefixes; 81 - 65 for a chunk, twice; the watermark.
        let window = 64 * 65 * 5 / 4 + 2 * 16 + 4;
        let full = (1 << 30) / 256 - window;
        let json = report.json();
        assert_eq!((&json["groups"][0]["blocks"], &json["groups"][1]["blocks"]), (&full.into(), &window.into()));
        assert!(report.table().contains("  window of 1,024 tokens: 5,236 blocks of 256 B"), "{}", report.table());
    }

    #[test]
    fn people_read_units_and_commas() {
        let report = Report {
            model: "llama-3-8b".into(),
            layout: KvLayout::llama(16, 32, 8, 128, Dtype::Bf16).unwrap(),
            weights_bytes: None,
            memory: Some(40 << 30),
            demand: DEMAND,
            contexts: vec![2_048, 8_192],
            refused: None,
        };
        let table = report.table();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "llama-3-8b: 128 KiB of KV per token");
        assert_eq!(lines[2], "Memory for KV: 40 GiB, 20,480 blocks");
        assert_eq!(lines[5].split_whitespace().collect::<Vec<_>>(), ["2,048", "256", "MiB", "160"]);
        assert_eq!(lines[6].split_whitespace().collect::<Vec<_>>(), ["8,192", "1", "GiB", "40"]);
        let without = Report { memory: None, refused: Some("no such kernel".into()), ..report }.table();
        assert!(without.contains("--gpu-memory") && without.contains("cannot be served: no such kernel"), "{without}");
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!([512, 23_040, 1 << 30, 3 << 39].map(size), ["512 B", "22.5 KiB", "1 GiB", "1.5 TiB"]);
    }
}
