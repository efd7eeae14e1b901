//! Every pair of ways to write, for puts and for gets, given up by either side in the middle of the writes: blocks that are used again
//! change no more, whichever side's writes are one-sided. And the hazard: a get whose reader writes by messages, so that its door is shut,
//! from an owner that writes past every door.

mod common;

use baton_kv_transfer::*;
use baton_types::fence::AlreadyDone;
use baton_types::*;
use common::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// 64 KiB a block and layer: 64 MiB a layer, far more than sockets hold.
const BLOCKS: u32 = 1024;
const TOKENS: u32 = BLOCKS * 16;
const LAYERS: u32 = 2;
/// Tries at the hazard.
const ROUNDS: u32 = 20;
/// A kind of messages.
const NOT_HELD: u8 = 16;
/// How long writes of what was given up may still come.
const LATE: Duration = Duration::from_millis(500);

/// Everything is posted at once, and lies in sockets and queues of the lanes.
const AT_ONCE: usize = 1 << 30;
/// Hardly anything is posted, and the rest waits for its turn.
const IN_TURNS: usize = 1 << 20;

fn config(name: &'static str, in_flight_bytes_max: usize) -> NodeConfig {
    let mut config = NodeConfig::new(name, KvLayout::llama(16, LAYERS, 8, 128, Dtype::Bf16).unwrap(), BLOCKS);
    config.limits.in_flight_bytes_max = in_flight_bytes_max;
    // Where a connection is closed under them, puts over lanes that emulate them may end the process, by UCX.
    (config.limits.abort_ms, config.limits.flush_ms) = (60_000, 60_000);
    config.seed = 0; // Blocks in order: the first one is written first.
    config
}

fn choice_of(way: &str) -> TransportChoice {
    match way {
        "puts" => ucx_one_sided(),
        "reads" => ucx_read(),
        _ => TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into()),
    }
}

fn request() -> RequestId {
    RequestId::try_new("r").unwrap()
}

fn filled(node: &Node, byte: u8) {
    node.write(0, &vec![byte; node.map.bytes()]);
}

/// Waits until something of layer 0 has come, and therefore hardly anything of the last one.
fn begun(node: &Node, first: BlockId) {
    let (at, mut bytes, until) = (node.map.plane_offset(0, 0, first, 0), [0; 64], Instant::now() + PATIENCE);
    while bytes == [0; 64] {
        assert!(Instant::now() < until, "nothing arrives");
        std::thread::yield_now();
        node.read(at, &mut bytes);
    }
}

/// Uses the blocks of the last layer for something else once they are free; how many bytes change afterwards.
fn changed_after_reuse(node: &Node, writer: &Node) -> usize {
    eventually("its blocks are free", || node.pool.is_whole());
    let again = node.pool.take(BLOCKS as usize, 0).expect("all are free");
    let (mine, layer) = (vec![0xab; node.map.bytes() / LAYERS as usize], node.map.bytes() / LAYERS as usize);
    node.write(node.map.bytes() - layer, &mine);
    std::thread::sleep(LATE);
    eventually("its writer is done", || writer.is_quiet());
    let mut found = vec![0; layer];
    node.read(node.map.bytes() - layer, &mut found);
    drop(again);
    mine.iter().zip(&found).filter(|(a, b)| a != b).count()
}

/// A get in the middle of its writes, given up by its reader or its owner.
fn get_given_up((readers, owners): (&str, &str), in_flight: usize, by_reader: bool, hazard: Option<Hazard>) -> usize {
    let mut ours = config("p", in_flight);
    ours.hazards = hazard.into();
    let (reader, owner) = (ours.start(choice_of(readers)), config("d", in_flight).start(choice_of(owners)));
    owner.serve("s", TOKENS, 5);
    let (get, blocks) = reader.get(&owner.peer(), "s", TOKENS, Instant::now() + PATIENCE);
    begun(&reader, blocks.0[0].blocks[0]);
    owner.evict("s");
    if by_reader {
        get.abort("nobody wants it any more");
    } else {
        owner.transfer.cancel(&request(), "the blocks are needed");
    }
    match get.wait() {
        Err(failure) => {
            assert!(matches!(failure, HandoffFailure::Aborted(_) | HandoffFailure::Unpinned(_)), "{failure}");
        }
        Ok(got) => drop(got), // It was done before it was given up.
    }
    let changed = changed_after_reuse(&reader, &owner);
    assert!(hazard.is_some() || reader.is_quiet());
    changed
}

/// A put in the middle of its writes, given up by its source or its sink.
fn put_given_up((sources, sinks): (&str, &str), in_flight: usize, by_source: bool) -> usize {
    let (source, sink) =
        (config("p", in_flight).start(choice_of(sources)), config("d", in_flight).start(choice_of(sinks)));
    filled(&source, 0x11);
    let hold = source.pool.take(BLOCKS as usize, 0).unwrap();
    let (blocks, deadline) = (hold.blocks.clone(), Instant::now() + PATIENCE);
    let open = PutRequest { request_id: request(), tokens: TOKENS, blocks, deadline, hold };
    let put = source.transfer.put(&sink.peer(), open).unwrap();
    let done: Fence = Arc::new(AlreadyDone);
    (0..LAYERS).for_each(|layer| put.layer_launched(layer, TOKENS as usize, &done));
    begun(&sink, BlockId(0));
    if by_source {
        put.abort("nobody wants it any more");
    } else {
        sink.transfer.cancel(&request(), "nobody wants it any more");
    }
    let failure = put.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Aborted(_) | HandoffFailure::AbortedByPeer(_)), "{failure}");
    let changed = changed_after_reuse(&sink, &source);
    assert!(sink.is_quiet() && sink.pool.quarantined() == 0);
    changed
}

macro_rules! every_pair {
    ($($name:ident: $ours:literal, $theirs:literal;)*) => {$(
        mod $name {
            use super::*;
            #[test]
            fn a_put_given_up_by_its_source_changes_nothing_late() {
                for in_flight in [AT_ONCE, IN_TURNS] {
                    let changed = put_given_up(($ours, $theirs), in_flight, true);
                    assert_eq!(changed, 0, "{in_flight} bytes at a time");
                }
            }
            #[test]
            fn a_put_given_up_by_its_sink_changes_nothing_late() {
                for in_flight in [AT_ONCE, IN_TURNS] {
                    let changed = put_given_up(($ours, $theirs), in_flight, false);
                    assert_eq!(changed, 0, "{in_flight} bytes at a time");
                }
            }
            #[test]
            fn a_get_given_up_by_its_reader_changes_nothing_late() {
                for in_flight in [AT_ONCE, IN_TURNS] {
                    let changed = get_given_up(($ours, $theirs), in_flight, true, None);
                    assert_eq!(changed, 0, "{in_flight} bytes at a time");
                }
            }
            #[test]
            fn a_get_given_up_by_its_owner_changes_nothing_late() {
                for in_flight in [AT_ONCE, IN_TURNS] {
                    let changed = get_given_up(($ours, $theirs), in_flight, false, None);
                    assert_eq!(changed, 0, "{in_flight} bytes at a time");
                }
            }
        }
    )*};
}
every_pair! {
    messages_and_messages: "messages", "messages";
    messages_and_puts: "messages", "puts";
    puts_and_messages: "puts", "messages";
    puts_and_puts: "puts", "puts";
    reads_and_reads: "reads", "reads";
    reads_and_puts: "reads", "puts";
    puts_and_reads: "puts", "reads";
    messages_and_reads: "messages", "reads";
}

#[test]
fn without_the_drain_an_owner_writes_into_reused_blocks() {
    // Where this thread gets no processor for a while, nothing may be under way any more when it gives up.
    let changed =
        (0..ROUNDS).any(|_| get_given_up(("messages", "puts"), AT_ONCE, true, Some(Hazard::PretendedFences)) > 0);
    assert!(changed, "no late write: the tests beside this one show nothing");
}

/// A get whose owner goes away in the middle of its writes, over lanes that nothing fences.
#[test]
fn blocks_that_a_lost_owner_could_still_write_wait_until_it_is_dead() {
    let mut ours = config("p", AT_ONCE);
    (ours.hazards, ours.limits.quarantined_blocks_max) = ([Hazard::NoFences].into(), BLOCKS as usize);
    let (reader, owner) = (ours.start(choice_of("messages")), config("d", AT_ONCE).start(choice_of("messages")));
    owner.serve("s", TOKENS, 5);
    // It goes without a word.
    owner.gate.bend(|message| if message[3] == NOT_HELD { Vec::new() } else { vec![message] });
    let (get, blocks) = reader.get(&owner.peer(), "s", TOKENS, Instant::now() + PATIENCE);
    begun(&reader, blocks.0[0].blocks[0]);
    owner.transfer.stop(Instant::now());
    let failure = get.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::PeerLost(_)), "{failure}");
    eventually("its blocks are quarantined", || {
        reader.transfer.stats().quarantined.values().copied().collect::<Vec<_>>() == [BLOCKS as usize]
    });
    assert!(!reader.pool.is_whole());
    assert_eq!(reader.transfer.stats().readers, 0, "it is over, and takes no place of others");
    let again = config("d", AT_ONCE).start(choice_of("messages"));
    let (refused, _) = again.offer(&reader.peer(), "no", 16, 1);
    let refused = refused.wait().unwrap_err();
    assert!(matches!(refused, HandoffFailure::Refused { reason: RefuseReason::Quarantine, .. }), "{refused}");
    reader.transfer.peer_is_dead(owner.transfer.party());
    eventually("its blocks are back", || reader.is_quiet());
}

#[test]
fn a_get_beyond_the_quarantine_bound_does_not_begin_where_nothing_fences_its_owner() {
    let mut ours = config("p", AT_ONCE);
    ours.hazards = [Hazard::NoFences].into(); // A quarter of the pool may come to be quarantined.
    let (reader, owner) = (ours.start(choice_of("messages")), config("d", AT_ONCE).start(choice_of("messages")));
    owner.serve("s", TOKENS, 5);
    let (get, _) = reader.get(&owner.peer(), "s", TOKENS, Instant::now() + PATIENCE);
    let failure = get.wait().unwrap_err();
    assert!(matches!(failure, HandoffFailure::Refused { reason: RefuseReason::Quarantine, .. }), "{failure}");
    assert_eq!(owner.transfer.stats().total.puts, 0, "nothing was written");
    eventually("its blocks are back", || reader.pool.is_whole());
    let (get, _) = reader.get(&owner.peer(), "s", TOKENS / 8, Instant::now() + PATIENCE);
    drop(get.wait().unwrap());
    owner.evict("s");
    eventually("both pools are whole", || reader.is_quiet() && owner.is_quiet());
}
