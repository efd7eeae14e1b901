//! Sequences with adapters in one engine: each has the bits it has alone, and no KV of one adapter is found by rows of another.

mod common;

use baton_engine::formats::{ModelSource, RandomModel};
use baton_engine::{
    AdapterUse, Engine, EngineConfig, EngineHandle, Model, ModelError, PrefixUse, Run, SequenceEvent, SequenceRequest,
    SubmitError,
};
use baton_kernels::adapter::{Adapter, AdapterBounds, AdapterLinear, Linear, PackedAdapter};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::{Device, DeviceError};
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::step::AdapterSlot;
use baton_kv_cache::PrefixHasher;
use baton_types::{Digest, KvPoolMap, SamplingParams, TokenId};
use common::{FOREVER, Sink};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

const MODEL: &str = "random:hidden=70,layers=2,heads=4,kv_heads=2,head_dim=18,ffn=90,vocab=301,context=128,seed=5";
const BOUNDS: AdapterBounds = AdapterBounds { slots_max: 2, rank_max: 4 };

/// Changes the values, and so the KV, of the first layer.
fn adapter(seed: u32) -> Adapter {
    let wave = |len: usize, step: f32| (0..len).map(|i| ((i as f32 + seed as f32) * step).sin()).collect();
    let change =
        AdapterLinear { layer: 0, linear: Linear::Value, a: wave(3 * 70, 0.7), b: wave(36 * 3, 1.3), scale: 0.5 };
    Adapter { rank: 3, linears: vec![change] }
}

fn packed(seed: u32) -> Arc<PackedAdapter> {
    Arc::new(adapter(seed).pack().unwrap())
}

struct Served {
    engine: EngineHandle,
    /// Of the adapters in the slots 0 and 1.
    digests: [Digest; 2],
}

fn serve(lagging: bool) -> Served {
    let source = RandomModel::parse(MODEL).unwrap();
    let config = EngineConfig {
        model_len_max: source.spec().context,
        chunk_tokens_max: 20,
        running_max: 4,
        watermark_blocks: 0,
        adapters: BOUNDS,
        ..EngineConfig::default()
    };
    let cpu = CpuDevice::new(CpuConfig::default()).unwrap();
    let device: Arc<dyn Device> = if lagging { Lagging::new(cpu, LagConfig::default()) } else { cpu };
    let mut model = Model::load(&source, device.as_ref(), config.model_config(), &|_| ()).unwrap();
    let digests = [0, 1].map(|slot| model.load_adapter(AdapterSlot(slot), packed(slot)).unwrap());
    let refused = model.load_adapter(AdapterSlot(2), packed(2)).unwrap_err();
    assert!(matches!(refused, ModelError::Device(DeviceError::AdapterSlots { slots_max: 2, .. })), "{refused}");
    let map = KvPoolMap::try_new(model.layout(16).unwrap(), 32).unwrap();
    let memory = device.alloc_pool(&map).unwrap();
    memory.write_by(Instant::now() + FOREVER, 0, &vec![0xff; map.bytes()]).unwrap();
    Served { engine: Engine::start(model, memory, &map, config).unwrap(), digests }
}

fn hasher() -> PrefixHasher {
    PrefixHasher::new(&Digest([1; 32]), b"tenant")
}

/// A request with the adapter in a slot.
fn request(served: &Served, slot: Option<u32>) -> SequenceRequest {
    let tokens: Vec<TokenId> = (0..50).map(|t| (t * t + 3) % 301).collect();
    let prefix = match slot {
        Some(slot) => PrefixUse::of_adapter(hasher(), served.digests[slot as usize], &tokens),
        None => PrefixUse::new(hasher(), &tokens),
    };
    let sampling = SamplingParams {
        temperature: 0.0,
        max_tokens: 20,
        ignore_eos: true,
        logprobs: Some(2),
        ..SamplingParams::default()
    };
    let adapter = slot.map(|slot| used(slot, served.digests[slot as usize]));
    SequenceRequest { prefix: Some(prefix), adapter, ..common::request("request", tokens, sampling) }
}

fn used(slot: u32, digest: Digest) -> AdapterUse {
    AdapterUse { slot: AdapterSlot(slot), digest, kept: Arc::new(()) }
}

fn submit(served: &Served, request: SequenceRequest) -> Receiver<SequenceEvent> {
    let (sender, events) = channel();
    served.engine.submit(request, Run::Full, Box::new(Sink(sender))).unwrap().detach();
    events
}

/// Tokens with the bits of their log-probabilities, and how many tokens were cached.
fn finish(events: &Receiver<SequenceEvent>) -> (Vec<(TokenId, u32)>, usize) {
    let (mut output, mut cached) = (Vec::new(), 0);
    loop {
        match events.recv_timeout(FOREVER).expect("an event") {
            SequenceEvent::Token { token, logprobs, reuse, .. } => {
                output.push((token, logprobs.unwrap().chosen.to_bits()));
                cached += reuse.map_or(0, |reuse| reuse.cached_tokens);
            }
            SequenceEvent::Finished { .. } => return (output, cached),
            SequenceEvent::Failed { message, .. } => panic!("{message}"),
            _ => {}
        }
    }
}

#[test]
fn adapters_share_a_batch_and_no_kv() {
    let slots = [None, Some(0), Some(1)];
    let want = slots.map(|slot| {
        let served = serve(false);
        finish(&submit(&served, SequenceRequest { prefix: None, ..request(&served, slot) })).0
    });
    assert!(want[0] != want[1] && want[1] != want[2] && want[0] != want[2]);
    for lagging in [false, true] {
        let served = serve(lagging);
        for cached in [0, 48] {
            let running = slots.map(|slot| submit(&served, request(&served, slot)));
            for (events, want) in running.iter().zip(&want) {
                // In the second round each finds its own.
                assert_eq!(finish(events), (want.clone(), cached), "lagging {lagging}");
            }
        }
    }
}

#[test]
fn requests_that_name_another_adapter_are_refused() {
    let served = serve(false);
    let refused = |request| {
        let (sender, _events) = channel();
        served.engine.submit(request, Run::Full, Box::new(Sink(sender))).map(|_| ()).unwrap_err()
    };
    // A slot without an adapter, and one with another.
    for (slot, digest) in [(2, served.digests[0]), (1, served.digests[0])] {
        let unknown = SequenceRequest { adapter: Some(used(slot, digest)), prefix: None, ..request(&served, None) };
        assert_eq!(refused(unknown), SubmitError::UnknownAdapter(AdapterSlot(slot)));
    }
    let plain = request(&served, None).prefix;
    let of_first = request(&served, Some(0)).prefix;
    for (adapter, prefix) in [(Some(0), plain), (None, of_first.clone()), (Some(1), of_first)] {
        let request = SequenceRequest {
            prefix,
            ..SequenceRequest {
                adapter: adapter.map(|slot| used(slot, served.digests[slot as usize])),
                ..request(&served, None)
            }
        };
        assert!(matches!(refused(request), SubmitError::Invalid(message) if message.contains("another adapter")));
    }
}

/// Loads or frees a slot, and waits until the engine has done it.
fn change(served: &Served, slot: u32, adapter: Option<Arc<PackedAdapter>>) -> Result<(), ModelError> {
    let (sender, done) = channel();
    served.engine.set_adapter(AdapterSlot(slot), adapter, move |result| sender.send(result).unwrap());
    done.recv_timeout(FOREVER).expect("the engine carries it out")
}

#[test]
fn adapters_change_while_the_engine_runs() {
    for lagging in [false, true] {
        let mut served = serve(lagging);
        let run = |served: &Served, slot| finish(&submit(served, request(served, slot))).0;
        let (plain, first) = (run(&served, None), run(&served, Some(0)));
        // Its sequence has ended, which no step told the device.
        let kept = Arc::new(());
        let busy = SequenceRequest {
            adapter: Some(AdapterUse { kept: kept.clone(), ..used(1, served.digests[1]) }),
            ..request(&served, Some(1))
        };
        let running = submit(&served, busy);
        change(&served, 0, Some(packed(7))).unwrap();
        served.digests[0] = packed(7).digest();
        let replaced = run(&served, Some(0));
        assert!(replaced != first && replaced != plain, "lagging {lagging}");
        finish(&running);
        let by = Instant::now() + FOREVER;
        while Arc::strong_count(&kept) > 1 {
            assert!(Instant::now() < by, "the sequence has ended, and lets its adapter go");
            std::thread::yield_now();
        }
        change(&served, 1, None).unwrap();
        let error = served.engine.submit(request(&served, Some(1)), Run::Full, Box::new(Sink(channel().0))).map(|_| ());
        assert_eq!(error.unwrap_err(), SubmitError::UnknownAdapter(AdapterSlot(1)));
        // The first one again, in the other slot: its prefixes are still cached.
        change(&served, 1, Some(packed(0))).unwrap();
        served.digests[1] = packed(0).digest();
        let (again, cached) = finish(&submit(&served, request(&served, Some(1))));
        assert_eq!((again, cached), (first, 48), "lagging {lagging}");
        let refused = change(&served, 2, Some(packed(0))).unwrap_err();
        assert!(matches!(refused, ModelError::Device(DeviceError::AdapterSlots { slots_max: 2, .. })), "{refused}");
        assert_eq!(run(&served, None), plain);
    }
}
