//! A source and a sink agree on the bounds of a part, for any start, any block sizes and any order in which layers become ready.

use super::{Expected, Sink, SinkAction, SinkInput};
use crate::checksum::{ALGORITHM, GRANULE, sums_of};
use crate::message::SumRun;
use crate::put::source::machine::{ABORT_EPOCH, Source, SourceAction, SourceInput};
use baton_types::{Dtype, GroupKind, KvGroup, KvLayout, KvPlane, TicketId};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

const TICKET: TicketId = TicketId(3);
const LAYERS: u32 = 3;

/// A group of two layers with k and v, and one of a single layer and plane.
fn layout(block_tokens: u32) -> KvLayout {
    let plane = |name: &str| KvPlane::try_new(name, 2, 8, Dtype::Bf16).unwrap();
    let groups = vec![
        KvGroup { kind: GroupKind::Full, layers: vec![0, 2], planes: vec![plane("k"), plane("v")] },
        KvGroup { kind: GroupKind::Latent, layers: vec![1], planes: vec![plane("c")] },
    ];
    KvLayout::try_new(block_tokens, groups).unwrap()
}

/// Both sides; everything between them happens at once.
struct Pair {
    source: Source,
    sink: Sink,
    layout: KvLayout,
    now: Instant,
    copied: Vec<(usize, usize, Range<u32>)>,
    delivered: bool,
}

impl Pair {
    fn new(block_tokens: [u32; 2], tokens: u32, epoch_bytes: u64) -> Self {
        let (now, deadline) = (Instant::now(), Instant::now() + Duration::from_secs(60));
        let [layout, theirs] = block_tokens.map(layout);
        let token_bytes = layout.bytes_per_token() as u64;
        let expected = Expected { tokens, token_bytes, algorithm: ALGORITHM };
        let sink = Sink::new(TICKET, &theirs, expected, deadline, Duration::from_secs(1));
        let source = Source::new(layout.clone(), tokens, deadline, epoch_bytes, Duration::from_secs(1));
        Self { source, sink, layout, now, copied: Vec::new(), delivered: false }
    }

    fn tell_source(&mut self, input: SourceInput) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for action in self.source.handle(self.now, input) {
                match action {
                    SourceAction::Copy { epoch, group, layer, tokens } => {
                        let sums = vec![0; sums_of(&self.layout, group, &tokens)];
                        let first_granule = tokens.start / GRANULE;
                        let run = SumRun { group: group as u8, layer: layer as u16, first_granule, sums };
                        self.copied.push((group, layer, tokens));
                        inputs.push_back(SourceInput::Summed { epoch, run });
                    }
                    SourceAction::Flush { epoch: ABORT_EPOCH } => panic!("the source gives up"),
                    SourceAction::Flush { epoch } => inputs.push_back(SourceInput::Flushed { epoch, ok: true }),
                    SourceAction::SendChecksums(runs) => self.tell_sink(SinkInput::Checksums(runs)),
                    SourceAction::SendCommit { sums, bytes } => {
                        let (algorithm, tokens, extra) = (ALGORITHM, vec![0; 1000], vec![]);
                        let commit = crate::message::Commit {
                            ticket: TICKET,
                            algorithm,
                            sums,
                            bytes,
                            prompt_len: 1,
                            tokens,
                            extra,
                        };
                        self.tell_sink(SinkInput::Commit(Box::new(commit)));
                    }
                    SourceAction::Cancel | SourceAction::ReleaseHold | SourceAction::Done(Ok(())) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    fn tell_sink(&mut self, input: SinkInput) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for action in self.sink.handle(self.now, input) {
                match action {
                    SinkAction::Verify(runs) => {
                        let sums = runs.iter().map(|run| run.sums.len() as u64).sum();
                        inputs.push_back(SinkInput::Verified { sums });
                    }
                    SinkAction::CloseWindow => inputs.push_back(SinkInput::WindowClosed),
                    SinkAction::Deliver(_) => self.delivered = true,
                    SinkAction::SendGrant => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn every_position_of_a_part_is_copied_once_and_the_commit_covers_it(
        sizes in [prop::sample::select(vec![16u32, 32, 48, 112, 128]), prop::sample::select(vec![16u32, 32, 48, 128])],
        tokens in 1u32..400,
        pick in any::<u32>(),
        steps in prop::collection::vec((0..LAYERS, 1u32..400), 0..12),
        granted_after in 0usize..12,
        epoch_bytes in 1u64..20_000,
    ) {
        let from = pick % ((tokens - 1) / sizes[1] + 1) * sizes[1];
        let mut pair = Pair::new(sizes, tokens, epoch_bytes);
        let granted = |pair: &mut Pair| {
            pair.tell_sink(SinkInput::Granted { from });
            pair.tell_source(SourceInput::Granted { ticket: TICKET, from });
        };
        for (i, (layer, tokens_end)) in steps.iter().enumerate() {
            if i == granted_after {
                granted(&mut pair);
            }
            pair.tell_source(SourceInput::LayerReady { layer: *layer, tokens_end: *tokens_end });
        }
        (0..LAYERS).for_each(|layer| pair.tell_source(SourceInput::LayerReady { layer, tokens_end: tokens }));
        pair.tell_source(SourceInput::Finish);
        if granted_after >= steps.len() {
            prop_assert!(pair.copied.is_empty(), "a copy without a grant");
            granted(&mut pair);
        }
        prop_assert!(pair.delivered, "the commit does not cover what was granted");
        for (group, layer) in [(0, 0), (0, 1), (1, 0)] {
            let of_layer = pair.copied.iter().filter(|(g, l, _)| (*g, *l) == (group, layer));
            let copied: Vec<u32> = of_layer.flat_map(|(_, _, tokens)| tokens.clone()).collect();
            prop_assert_eq!(copied, (from..tokens).collect::<Vec<_>>());
        }
    }
}
