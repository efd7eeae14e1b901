use super::*;

fn rates() -> Rates {
    Rates {
        prefill: crate::rates::PrefillRates {
            tokens_per_s: 10_000.0,
            context_s_per_token: 1e-9,
            prompt_s: 0.01,
            chunk_tokens: 512,
        },
        decode: crate::rates::DecodeRates {
            step_s: 0.02,
            sequence_s: 0.0001,
            context_s_per_token: 1e-8,
            running_max: 16,
            chunk_tokens: 256,
        },
        kv: crate::rates::KvRates { bytes_per_token: 100_000, pool_tokens: 100_000 },
        transfer: crate::rates::TransferRates { bytes_per_s: 1e10, latency_s: 0.0004 },
        router: crate::rates::RouterRates { round_trip_s: 0.001 },
    }
}

fn fleet(policy: PlacementPolicy) -> Fleet {
    Fleet {
        rates: Arc::new(rates()),
        policy,
        prefill: 3,
        decode: 2,
        block_tokens: 64,
        prefill_blocks: 150,
        decode_blocks: 150,
        len_max: 4_000,
        ttl: None,
        gets: true,
        seed: 3,
    }
}

/// Turns of 40 conversations; each turn begins with all tokens of the turn before.
fn conversations() -> (Vec<Ask>, impl Fn(usize) -> Vec<TokenId> + Send + Sync + 'static) {
    let ask = |n: u64| Ask { at: Duration::from_millis(n * 83), answer_tokens: 1 + (n % 30) as u32 };
    let prompt = |n: usize| {
        let (conversation, turn) = (n % 40, n / 40);
        let token = |i: usize| ((conversation * 31 + i * 7 + i / 64 * conversation) % 64) as TokenId;
        (0..300 * (turn + 1) + conversation).map(token).collect()
    };
    ((0..200).map(ask).collect(), prompt)
}

#[test]
fn when_all_is_over_nothing_is_held_and_the_router_knows_what_is_cached() {
    for policy in PlacementPolicy::ALL {
        let (asks, prompt) = conversations();
        let (cluster, clients) = fleet(policy).start(asks, Arc::new(prompt));
        while !clients.are_over() && cluster.executor.step(Time::MAX) {}
        // Until then, cache reports have arrived and the last handoffs are acknowledged.
        let quiet = cluster.executor.time() + ms(1_000);
        while cluster.executor.step(quiet) {}
        assert_eq!(cluster.breaches.first(), None);
        let (router, prepared) = (&cluster.routers()[0], clients.prepared.lock().clone());
        assert_eq!((router.requests(), prepared.len()), (0, 200), "{policy}");
        for worker in cluster.workers() {
            let (who, counts) = (&worker.party().instance, worker.engine.pool().counts());
            assert_eq!((counts.referenced, counts.quarantined), (0, 0), "{policy}, {who}");
            assert!(counts.cached > 0 && worker.engine.pool().cache_counts().evicted > 0, "{policy}, {who}");
            for request in &prepared {
                let known = router.known_of(request).into_iter().find(|(party, _)| party == worker.party());
                let has = worker.engine.pool().cached_tokens(request.hashes());
                assert_eq!(known.map_or(0, |(_, tokens)| tokens), has, "{policy}, {who}, {}", request.id);
            }
        }
        let served = clients.take();
        let tokens = served.iter().map(|served| served.gaps_us.len() + 1);
        assert!(tokens.eq((0..200).map(|n| 1 + n % 30)) && served.iter().all(|served| served.failed.is_none()));
        cluster.end();
    }
}

#[test]
fn pools_have_the_largest_blocks_that_divide_those_of_a_trace() {
    for (of, expected) in [(512, 128), (128, 128), (48, 48), (160, 80), (16, 16), (7, 16)] {
        assert_eq!(Fleet::block_tokens(of), expected, "{of}");
    }
}

#[test]
fn idle_blocks_go_after_their_time() {
    let cached = |ttl, at_s| {
        let asks = [0, at_s].map(|at| Ask { at: Duration::from_secs(at), answer_tokens: 8 });
        let fleet = Fleet { ttl, ..fleet(PlacementPolicy::Cost) };
        let outcome = fleet.serve(asks.to_vec(), |_| vec![5; 1_000]).unwrap();
        outcome.served[1].cached_tokens
    };
    let ttl = Some(Duration::from_secs(30));
    assert_eq!((cached(ttl, 20), cached(ttl, 40), cached(None, 40_000)), (960, 0, 960));
}
