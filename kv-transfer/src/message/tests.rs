use super::*;
use crate::message::RemoteRegion;
use crate::{HeadShard, Party};
use baton_types::{
    BlockId, BlockTable, Compatibility, Digest, Dtype, GroupBlocks, GroupKind, Incarnation, InstanceId, KvGroup,
    KvLayout, KvPlane, NumericsClass, ProtocolRange,
};
use proptest::prelude::*;

fn party(name: &str) -> Party {
    Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(7) }
}

fn hello() -> Hello {
    let plane = |name: &str| KvPlane::try_new(name, 3, 64, Dtype::Bf16).unwrap();
    let groups = vec![
        KvGroup { kind: GroupKind::Full, layers: vec![0, 2], planes: vec![plane("k"), plane("v")] },
        KvGroup { kind: GroupKind::Window(512), layers: vec![1], planes: vec![plane("k")] },
        KvGroup { kind: GroupKind::State, layers: vec![3, 5], planes: vec![plane("conv"), plane("state")] },
    ];
    let class = NumericsClass { order: "cpu".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 3 };
    let layout = KvLayout::try_new(32, groups).unwrap();
    Hello {
        protocol: ProtocolRange { min: 1, max: 2 },
        capabilities: 5,
        required: 0,
        party: party("p-0"),
        expects: party("d-0"),
        compatibility: Compatibility { model: Digest([9; 32]), layout, class },
        shard: HeadShard::try_new(1, 3).unwrap(),
        pool_blocks: vec![77; 3],
        region: RemoteRegion {
            address: 1 << 40,
            bytes: 1 << 30,
            key: vec![1, 2, 3],
            reads_only: false,
            takes_reads: true,
        },
    }
}

/// Tables of a full group and of one with a window.
fn late() -> BlockTables {
    let table = |first, ids: &[u32]| BlockTable { first, blocks: ids.iter().copied().map(BlockId).collect() };
    BlockTables(vec![table(0, &[5, 6, 7]), table(2, &[9])])
}

fn samples() -> Vec<Message> {
    let ticket = TicketId(0xfeed);
    let blocks = BlockTables::from_start(GroupBlocks(vec![vec![BlockId(1), BlockId(9)], vec![]]));
    let runs = vec![SumRun { group: 1, layer: 4, first_granule: 6, sums: vec![1, u64::MAX] }];
    let request_id = RequestId::try_new("r").unwrap();
    let offer = Offer {
        handoff: 4,
        request_id,
        source: party("a"),
        sink: party("b"),
        direction: Direction::Get,
        shards: 1,
        from: 0,
        tokens: 99,
        deadline_ms: 1000,
        name: vec![1, 2],
    };
    let (tokens, extra) = (vec![1, 2, 3], vec![0xff]);
    let commit = Commit { ticket, algorithm: 1, sums: 8, bytes: 1 << 33, prompt_len: 2, tokens, extra };
    vec![
        Message::Hello(Box::new(hello())),
        Message::Welcome(Box::new(hello())),
        Message::Reject { reason: RefuseReason::WrongIncarnation, detail: "x".into() },
        Message::Offer(Box::new(Offer { from: 48, ..offer.clone() })),
        Message::Offer(Box::new(offer)),
        Message::Grant { handoff: 4, ticket, blocks: blocks.clone(), from: 0 },
        Message::Grant { handoff: 4, ticket, blocks, from: 96 },
        Message::Refuse { handoff: 4, reason: RefuseReason::NoRoom, detail: "é".into() },
        Message::Checksums { ticket, runs },
        Message::Commit(Box::new(commit)),
        Message::Ack { ticket },
        Message::Grant { handoff: 4, ticket, blocks: late(), from: 0 },
        Message::Grant { handoff: 4, ticket, blocks: late(), from: 64 },
        Message::Ask { ticket, blocks: late() },
        Message::Ask { ticket, blocks: BlockTables::from_start(GroupBlocks(vec![vec![BlockId(3)]])) },
        Message::Confirm { ticket },
        Message::Held { ticket, algorithm: 1, sums: 8 },
        Message::NotHeld { ticket, detail: "x".into() },
        Message::Unpin { handoff: 4 },
        Message::Nack { ticket, reason: NackReason::NotAdopted, detail: String::new() },
        Message::Nack { ticket, reason: NackReason::Corrupt, detail: String::new() },
        Message::Nack { ticket, reason: NackReason::DeviceBusy, detail: "x".into() },
        Message::Nack { ticket, reason: NackReason::Device, detail: "x".into() },
        Message::Abort { handoff: 4, ticket, detail: "why".into() },
        Message::Aborted { handoff: 4, ticket, flushed: true, detail: "why".into() },
    ]
}

#[test]
fn every_message_round_trips_and_no_prefix_of_it_is_a_message() {
    for message in samples() {
        let bytes = message.encode();
        assert_eq!(Message::decode(&bytes).as_ref(), Ok(&message));
        for len in 0..bytes.len() {
            assert!(Message::decode(&bytes[..len]).is_err(), "{len} bytes of {message:?}");
        }
        let longer = Message::decode(&[bytes, vec![0]].concat());
        assert_eq!(longer.ok(), is_greeting(&message).then_some(message), "newer versions append to greetings alone");
    }
}

/// To a peer that does not know of reads it looks like one without a key, to which it sends messages.
#[test]
fn a_key_of_reads_is_behind_all_that_older_peers_read() {
    let greeting = |key, reads_only| {
        let region = RemoteRegion { key, reads_only, ..hello().region };
        Message::Hello(Box::new(Hello { region, pool_blocks: vec![77, 78, 77], ..hello() }))
    };
    let (of_reads, without_key) = (greeting(vec![1, 2, 3], true), greeting(vec![], false));
    assert_eq!(Message::decode(&of_reads.encode()).as_ref(), Ok(&of_reads));
    let (of_reads, without_key) = (of_reads.encode(), without_key.encode());
    let old = without_key.len() - 4;
    assert_eq!(of_reads[..old], without_key[..old]);
    assert_eq!(of_reads[old..], [3, 0, 0, 0, 1, 2, 3]);
}

fn is_greeting(message: &Message) -> bool {
    matches!(message, Message::Hello(_) | Message::Welcome(_) | Message::Reject { .. })
}

/// Peers of protocol 1 know only kinds up to 17, in exactly these bytes.
#[test]
fn the_whole_is_said_as_ever_and_a_part_by_kinds_of_its_own() {
    let grant = |from| Message::Grant { handoff: 4, ticket: TicketId(9), blocks: BlockTables(vec![]), from };
    let whole = grant(0).encode();
    assert_eq!(whole, [[0x42, 0x4b, 1, 5].as_slice(), &4u64.to_le_bytes(), &9u64.to_le_bytes(), &[0; 4]].concat());
    let part = grant(96).encode();
    assert_eq!(part, [[0x42, 0x4b, 1, 18].as_slice(), &96u32.to_le_bytes(), &whole[4..]].concat());
    // Each message has exactly one encoding.
    let zero = [[0x42, 0x4b, 1, 18].as_slice(), &[0; 4], &whole[4..]].concat();
    assert_eq!(Message::decode(&zero).unwrap_err().to_string(), "first position is that of the whole");
}

/// Peers without the capability know only the kind 10, in exactly these bytes.
#[test]
fn reasons_that_concern_a_device_are_a_kind_of_their_own() {
    use NackReason::{Corrupt, Device, DeviceBusy, NotAdopted};
    let nack = |reason| Message::Nack { ticket: TicketId(9), reason, detail: String::new() }.encode();
    for (reason, kind, flag) in [(NotAdopted, 10, 0), (Corrupt, 10, 1), (DeviceBusy, 22, 0), (Device, 22, 1)] {
        let bytes = [[0x42, 0x4b, 1, kind].as_slice(), &9u64.to_le_bytes(), &[flag], &[0; 4]].concat();
        assert_eq!(nack(reason), bytes, "{reason:?}");
        assert_eq!(reason.known_to(u64::MAX), reason);
        assert_eq!(reason.known_to(TABLES), if kind == 10 { reason } else { NotAdopted });
    }
}

#[test]
fn a_long_detail_is_cut_at_a_character() {
    let detail = "é".repeat(1000);
    let bytes = Message::Reject { reason: RefuseReason::Busy, detail: detail.clone() }.encode();
    let Ok(Message::Reject { detail: read, .. }) = Message::decode(&bytes) else { panic!("decodes") };
    assert!(detail.starts_with(&read) && read.len() == 1024);
}

#[test]
fn an_impossible_count_allocates_nothing() {
    let mut bytes = Message::Commit(Box::new(Commit {
        ticket: TicketId(1),
        algorithm: 1,
        sums: 0,
        bytes: 0,
        prompt_len: 0,
        tokens: vec![],
        extra: vec![],
    }))
    .encode();
    let count_at = bytes.len() - 8; // tokens' count, then extra's length
    bytes[count_at..count_at + 4].copy_from_slice(&4_000_000u32.to_le_bytes());
    assert_eq!(Message::decode(&bytes).unwrap_err().to_string(), "tokens is cut short");
}

/// Bytes on the heap.
trait Held {
    fn held(&self) -> usize;
}

fn vec_held<T>(items: &Vec<T>, each: impl Fn(&T) -> usize) -> usize {
    items.capacity() * size_of::<T>() + items.iter().map(each).sum::<usize>()
}

fn text_held(text: &str) -> usize {
    text.len()
}

impl Held for KvLayout {
    fn held(&self) -> usize {
        let group = |group: &KvGroup| {
            let planes = group.planes.capacity() * size_of::<KvPlane>();
            vec_held(&group.layers, |_| 0) + planes + group.planes.iter().map(|p| text_held(p.name())).sum::<usize>()
        };
        size_of_val(self.groups()) + self.groups().iter().map(group).sum::<usize>()
    }
}

impl Held for Message {
    fn held(&self) -> usize {
        let party = |party: &Party| text_held(party.instance.as_str());
        match self {
            Self::Hello(hello) | Self::Welcome(hello) => {
                let Hello { party: ours, expects, compatibility, region, .. } = &**hello;
                let names = party(ours) + party(expects) + text_held(&compatibility.class.order);
                size_of::<Hello>() + names + compatibility.layout.held() + region.key.capacity()
            }
            Self::Offer(offer) => {
                let names = party(&offer.source) + party(&offer.sink) + text_held(offer.request_id.as_str());
                size_of::<Offer>() + names + offer.name.capacity()
            }
            Self::Grant { blocks, .. } | Self::Ask { blocks, .. } => {
                vec_held(&blocks.0, |table| vec_held(&table.blocks, |_| 0))
            }
            Self::Checksums { runs, .. } => vec_held(runs, |run| vec_held(&run.sums, |_| 0)),
            Self::Commit(commit) => size_of::<Commit>() + vec_held(&commit.tokens, |_| 0) + commit.extra.capacity(),
            Self::Reject { detail, .. }
            | Self::Refuse { detail, .. }
            | Self::Nack { detail, .. }
            | Self::Abort { detail, .. }
            | Self::Aborted { detail, .. }
            | Self::NotHeld { detail, .. } => detail.capacity(),
            Self::Ack { .. } | Self::Confirm { .. } | Self::Held { .. } | Self::Unpin { .. } => 0,
        }
    }
}

/// A frame, as a peer sends it or damaged: a kind, then bytes that are mostly small numbers, so that counts are often plausible.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let number = prop_oneof![
        4 => (0u32..6).prop_map(|n| n.to_le_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 1..9),
        2 => Just(b"\x04\0\0\0bf16".to_vec()),
        2 => prop::collection::vec(Just(0u8), 1..24),
    ];
    let noise = (1u8..20, prop::collection::vec(number, 0..120))
        .prop_map(|(kind, fields)| [vec![0x42, 0x4b, 1, kind], fields.concat()].concat());
    let damaged =
        (prop::sample::select(samples()), prop::collection::vec((any::<prop::sample::Index>(), 0u8..9), 0..4))
            .prop_map(|(message, damage)| {
                let mut bytes = message.encode();
                damage.iter().for_each(|(at, byte)| *at.get_mut(&mut bytes[4..]) = *byte);
                bytes
            });
    prop_oneof![noise, damaged]
}

/// Besides the bytes of its contents, every message takes its own size once.
const MESSAGE_ITSELF: usize = size_of::<Hello>();

#[test]
fn lists_of_the_emptiest_take_four_times_their_bytes_at_most() {
    let count = 10_000;
    let empty = SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![] };
    let longest = [
        Message::Checksums { ticket: TicketId(1), runs: vec![empty; count] },
        Message::Grant {
            handoff: 1,
            ticket: TicketId(1),
            blocks: BlockTables::from_start(GroupBlocks(vec![vec![BlockId(0); count]; 8])),
            from: 0,
        },
        Message::Ask { ticket: TicketId(1), blocks: BlockTables::from_start(GroupBlocks(vec![vec![]; 8])) },
    ];
    for message in longest {
        let bytes = message.encode();
        let held = Message::decode(&bytes).unwrap().held();
        assert!(held <= 4 * bytes.len() + MESSAGE_ITSELF, "{} takes {held} of {}", message.name(), bytes.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]
    #[test]
    fn a_decoded_frame_takes_four_times_its_bytes_at_most(bytes in frames()) {
        if let Ok(message) = Message::decode(&bytes) {
            let held = message.held();
            prop_assert!(held <= 4 * bytes.len() + MESSAGE_ITSELF, "{held} of {}", bytes.len());
        }
    }
}

proptest! {
    #[test]
    fn damaged_messages_never_panic(which in 0usize..19, at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let mut bytes = samples()[which].encode();
        let i = at.index(bytes.len());
        bytes[i] = byte;
        if let Ok(message) = Message::decode(&bytes) {
            let read = message.encode();
            prop_assert!(bytes == read || is_greeting(&message) && bytes.starts_with(&read));
        }
        bytes.truncate(cut.index(bytes.len()));
        let _ = Message::decode(&bytes);
    }

    #[test]
    fn noise_never_panics(kind in 0u8..20, noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = vec![0x42, 0x4b, 1, kind];
        bytes.extend(noise);
        let _ = Message::decode(&bytes);
    }
}

/// Sequences of a pool without a group that keeps all positions may be of any length.
#[test]
fn messages_are_bounded_by_the_groups_that_keep_everything() {
    let planes = vec![KvPlane::try_new("p", 1, 8, Dtype::F32).unwrap()];
    let group = |(layer, kind)| KvGroup { kind, layers: vec![layer], planes: planes.clone() };
    let bound = |kinds: &[GroupKind]| {
        let layout = KvLayout::try_new(16, (0..).zip(kinds.iter().copied()).map(group).collect()).unwrap();
        message_bytes_max(&KvPoolMap::try_new(layout, 4).unwrap())
    };
    let (window, short) = (GroupKind::Window(32), MESSAGE_BYTES_MIN + 64 * MESSAGE_BYTES_PER_TOKEN);
    assert_eq!(bound(&[GroupKind::Full, GroupKind::State]), short);
    assert_eq!(bound(&[window, GroupKind::Latent]), short);
    assert_eq!([bound(&[GroupKind::State]), bound(&[window, GroupKind::State])], [MESSAGE_BYTES_MAX; 2]);
}
