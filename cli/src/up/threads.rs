//! `--threads`: the compute threads of the workers of one host.

use baton_worker::settings::ThreadCount;

/// Cores from which on prefill and decode get cores of their own.
const SPLIT_CORES: usize = 4;

/// Compute threads of each worker, by its role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkerThreads {
    pub(super) prefill: usize,
    pub(super) decode: usize,
}

/// Divides `cores` among so many workers.
///
/// Prefill is bound by compute: it is as fast as its cores are many. Decode is bound by memory, whose bandwidth a part of the cores takes up:
/// it gets a third of them, rounded up, and prefill the rest. Below [`SPLIT_CORES`] cores such a part would be one core, and an answer that is
/// alone on the host would leave the other idle in each of its phases. So all of them get the cores of the host there, and idle threads
/// park. The workers of one role divide what their role has.
pub(super) fn automatic(cores: usize, prefill: u16, decode: u16) -> WorkerThreads {
    let each = |cores: usize, workers: u16| (cores / usize::from(workers).max(1)).max(1);
    if prefill == 0 || cores < SPLIT_CORES {
        return WorkerThreads { prefill: each(cores, prefill), decode: each(cores, decode) };
    }
    let decodes = cores.div_ceil(3);
    WorkerThreads { prefill: each(cores - decodes, prefill), decode: each(decodes, decode) }
}

/// As [`automatic`], or the given number for each worker.
pub(super) fn of(count: ThreadCount, cores: usize, prefill: u16, decode: u16) -> WorkerThreads {
    match count {
        ThreadCount::Auto => automatic(cores, prefill, decode),
        ThreadCount::Fixed(count) => WorkerThreads { prefill: count, decode: count },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_divided_by_what_workers_do() {
        for (cores, prefill, decode, expected) in [
            // Cores, workers of each role, threads of each of them.
            (1, 1, 1, (1, 1)),
            (2, 1, 1, (2, 2)),
            (3, 1, 1, (3, 3)),
            (2, 1, 2, (2, 1)),
            (2, 2, 4, (1, 1)),
            (4, 1, 1, (2, 2)),
            (6, 1, 1, (4, 2)),
            (8, 1, 1, (5, 3)),
            (16, 1, 1, (10, 6)),
            (16, 2, 1, (5, 6)),
            (16, 1, 2, (10, 3)),
            (64, 2, 2, (21, 11)),
            (4, 8, 8, (1, 1)),
        ] {
            let WorkerThreads { prefill: p, decode: d } = automatic(cores, prefill, decode);
            assert_eq!((p, d), expected, "{cores} cores, {prefill} + {decode} workers");
        }
        for (cores, decode, expected) in [(2, 1, 2), (8, 1, 8), (8, 2, 4), (1, 3, 1)] {
            assert_eq!(automatic(cores, 0, decode).decode, expected, "{cores} cores, {decode} workers for both phases");
        }
    }

    #[test]
    fn separate_shares_never_exceed_the_host() {
        for cores in SPLIT_CORES..200 {
            for (prefill, decode) in [(1, 1), (2, 1), (1, 2), (3, 3)] {
                let threads = automatic(cores, prefill, decode);
                let all = threads.prefill * usize::from(prefill) + threads.decode * usize::from(decode);
                assert!(all <= cores.max(usize::from(prefill + decode)), "{cores} cores: {threads:?}");
            }
        }
    }

    #[test]
    fn a_number_is_for_each_worker() {
        assert_eq!(of(ThreadCount::Fixed(3), 8, 1, 1), WorkerThreads { prefill: 3, decode: 3 });
        assert_eq!(of(ThreadCount::Auto, 8, 1, 1), automatic(8, 1, 1));
    }
}
