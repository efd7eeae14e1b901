//! The hazard of cached blocks, and its guard: a source takes no heed of where its part begins, and writes from the first position on, into
//! blocks that other sequences read. On transports that store what their peers write; elsewhere a grant is a promise between workers that
//! trust each other.

mod common;

use baton_kv_transfer::*;
use common::*;

const TOKENS: u32 = 70;
/// What the sink has of them, in blocks of 16.
const CACHED: u32 = 48;
const GRANT: u8 = 5;
const PARTIAL_GRANT: u8 = 18;

/// What such a source leaves behind it: whether the bytes of other sequences are as before, and how many of its writes were refused.
fn written_from_the_first_position_on(choice: &TransportChoice, hazard: Option<Hazard>) -> (bool, u64) {
    let mut config = NodeConfig::new("d", small(16), 24);
    config.hazards = hazard.into();
    let (source, sink) = (NodeConfig::new("p", small(32), 24).start(choice.clone()), config.start(choice.clone()));
    sink.gate.bend(|message| match message[3] {
        PARTIAL_GRANT => vec![[&message[..3], &[GRANT], &message[8..]].concat()],
        _ => vec![message],
    });
    sink.cache(|_| CACHED);
    sink.fill_pool(7);
    // It gives the same blocks again.
    let taken = sink.pool.take(sink.map.layout().blocks_for(TOKENS as usize), NodeConfig::new("", small(16), 1).seed);
    let shared = sink.places(&taken.unwrap().blocks, 0..CACHED);
    let before = sink.read_all(&shared);
    let (put, _) = source.offer(&sink.peer(), "r", TOKENS, 9);
    source.send_all(&put, TOKENS);
    assert!(put.wait().is_err(), "it moved what was not asked for");
    assert!(sink.sink.take_adopted("r").is_none());
    eventually("both pools are whole", || source.is_quiet() && sink.is_quiet());
    let stats = source.transfer.stats();
    assert!(stats.total.bytes_put >= (source.map.layout().bytes_per_token() * CACHED as usize) as u64);
    (sink.read_all(&shared) == before, sink.transfer.stats().total.puts_refused)
}

fn without_its_window_a_source_writes_into_blocks_of_others(choice: &TransportChoice) {
    let (unchanged, refused) = written_from_the_first_position_on(choice, Some(Hazard::WindowsOfAllBlocks));
    assert!(!unchanged, "the test beside this one shows nothing");
    assert_eq!(refused, 0);
}

fn blocks_that_others_share_are_never_written(choice: &TransportChoice) {
    let (unchanged, refused) = written_from_the_first_position_on(choice, None);
    assert!(unchanged, "a write into cached blocks was stored");
    assert!(refused > 0);
}

macro_rules! where_windows_are {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            use super::*;
            #[test]
            fn tcp() {
                super::$name(&TransportChoice::Tcp { bind: [127, 0, 0, 1].into(), port: 0 });
            }
            #[test]
            fn ucx_messages() {
                super::$name(&TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into()));
            }
        }
    )*};
}
where_windows_are![
    without_its_window_a_source_writes_into_blocks_of_others,
    blocks_that_others_share_are_never_written,
];
