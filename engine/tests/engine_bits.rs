//! The whole engine over a real (small, random) model: tokens and log-probabilities have the same bits whatever runs beside a
//! sequence, however it is chunked, preempted, handed over, and on whichever backend of the class.

mod common;

use baton_engine::formats::{ModelSource, RandomModel};
use baton_engine::{Engine, EngineConfig, EngineHandle, Model, Run, SequenceControl, SequenceEvent, SequenceRequest};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_memory::{Pending, PoolMemory, Rows};
use baton_types::{BlockId, KvPoolMap, SamplingParams, TokenId};
use common::{Bits, FOREVER, Kept, Sink, bits, cached, request};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// No dimension is a multiple of a register tile; prompts reach over three attention slabs of 64 tokens.
const MODEL: &str = "random:hidden=198,layers=3,heads=6,kv_heads=2,head_dim=34,ffn=331,vocab=301,context=320,seed=5";

/// Two of three layers have a state.
const STATES: &str = "random:hidden=198,layers=3,heads=6,kv_heads=2,head_dim=34,ffn=331,vocab=301,context=320,seed=5,delta=4,delta_keys=2,\
                      delta_key_dim=23,delta_dim=19,attention_every=3,gate=true";

#[derive(Clone, Copy, Debug)]
struct Setup {
    model: &'static str,
    block_tokens: u32,
    blocks: u32,
    chunk: usize,
    running: usize,
    threads: usize,
    lagging: bool,
}

const ALONE: Setup =
    Setup { model: MODEL, block_tokens: 16, blocks: 32, chunk: 320, running: 1, threads: 1, lagging: false };

struct Served {
    engine: EngineHandle,
    memory: Arc<dyn PoolMemory>,
    map: KvPoolMap,
}

fn serve(setup: Setup) -> Served {
    let source = RandomModel::parse(setup.model).unwrap();
    let config = EngineConfig {
        model_len_max: source.spec().context,
        chunk_tokens_max: setup.chunk,
        running_max: setup.running,
        watermark_blocks: 0,
        ..EngineConfig::default()
    };
    let cpu = CpuDevice::new(CpuConfig { threads: setup.threads, ..CpuConfig::default() }).unwrap();
    let device: Arc<dyn Device> = if setup.lagging { Lagging::new(cpu, LagConfig::default()) } else { cpu };
    let model = Model::load(&source, device.as_ref(), config.model_config(), &|_| ()).unwrap();
    let map = KvPoolMap::try_new(model.layout(setup.block_tokens).unwrap(), setup.blocks).unwrap();
    // NaN everywhere: reading what was never stored cannot pass.
    let memory = device.alloc_pool(&map).unwrap();
    memory.write_by(Instant::now() + FOREVER, 0, &vec![0xff; map.bytes()]).unwrap();
    let engine = Engine::start(model, memory.clone(), &map, config).unwrap();
    Served { engine, memory, map }
}

type Running = (SequenceControl, Receiver<SequenceEvent>);

fn submit(served: &Served, request: SequenceRequest, run: Run) -> Running {
    let (sender, events) = channel();
    (served.engine.submit(request, run, Box::new(Sink(sender))).unwrap(), events)
}

fn finish((_control, events): Running) -> Vec<Bits> {
    let mut output = Vec::new();
    loop {
        match events.recv_timeout(FOREVER).expect("an event") {
            SequenceEvent::Started { .. } | SequenceEvent::Prompt(_) => {}
            SequenceEvent::Token { token, logprobs, .. } => {
                output.push(bits(token, &logprobs.expect("log-probabilities were asked for")));
            }
            SequenceEvent::Prefilled { .. } | SequenceEvent::Finished { .. } => return output,
            SequenceEvent::Failed { message, .. } => panic!("{message}"),
        }
    }
}

/// Prompts of 1 to 200 tokens, greedy and drawn, with and without penalties.
fn requests() -> Vec<SequenceRequest> {
    let lengths = [1, 5, 15, 16, 17, 40, 63, 64, 65, 130, 200, 33];
    let tokens = |(i, len): (usize, usize)| (0..len).map(|t| ((t * t + 7 * i + 3) % 301) as TokenId).collect();
    let sampling = |i: usize| SamplingParams {
        temperature: if i.is_multiple_of(3) { 0.0 } else { 1.3 },
        top_p: if i % 4 == 1 { 0.9 } else { 1.0 },
        repetition_penalty: if i.is_multiple_of(2) { 1.2 } else { 1.0 },
        frequency_penalty: if i.is_multiple_of(5) { 0.3 } else { 0.0 },
        seed: i as u64,
        max_tokens: 24,
        logprobs: Some(4),
        ..SamplingParams::default()
    };
    let request = |at: (usize, usize)| cached(request(format!("request-{}", at.0), tokens(at), sampling(at.0)));
    lengths.into_iter().enumerate().map(request).collect()
}

fn alone(model: &'static str) -> Vec<Vec<Bits>> {
    let served = serve(Setup { model, ..ALONE });
    let unshared = requests().into_iter().map(|request| SequenceRequest { prefix: None, ..request });
    unshared.map(|request| finish(submit(&served, request, Run::Full))).collect()
}

#[test]
fn a_sequence_has_the_bits_it_has_alone() {
    [MODEL, STATES].into_iter().for_each(has_the_bits_it_has_alone);
}

fn has_the_bits_it_has_alone(model: &'static str) {
    let expected = alone(model);
    let small = Setup { model, block_tokens: 16, blocks: 20, chunk: 7, running: 8, threads: 1, lagging: false };
    let setups = [
        Setup { blocks: 80, chunk: 64, running: 16, ..small },
        small,
        Setup { threads: 2, chunk: 33, ..small },
        Setup { block_tokens: 64, blocks: 5, chunk: 50, ..small },
        Setup { lagging: true, chunk: 96, ..small },
    ];
    let (mut preemptions, mut cached) = (0, 0);
    for setup in setups {
        let served = serve(setup);
        // In the second round much of it is cached, as far as so small a pool keeps it.
        for round in 0..2 {
            let running: Vec<_> = requests().into_iter().map(|request| submit(&served, request, Run::Full)).collect();
            for (i, (running, expected)) in running.into_iter().zip(&expected).enumerate() {
                assert_eq!(&finish(running), expected, "request {i} in round {round} with {setup:?}");
            }
        }
        cached += served.engine.load().cached_tokens;
        preemptions += served.engine.load().preemptions;
        assert_eq!(served.engine.pool().counts().referenced, 0);
    }
    assert!(preemptions > 0, "some of these pools are too small for all at once");
    assert!(cached > 0, "nothing was found cached");
}

/// Copies the KV of `tokens` positions between pools, run by run of tokens as a transfer cuts them.
fn copy(from: (&Served, &[BlockId]), to: (&Served, &[BlockId]), tokens: usize) {
    let place = |(served, blocks): (&Served, &[BlockId]), layer: usize, plane: usize, token: usize| {
        let size = served.map.layout().block_tokens();
        let within = token as u32 % size;
        served.map.token_range(0, layer, blocks[token / size as usize], plane, within..within + 1)
    };
    let all = || (0..3).flat_map(|layer| (0..2).map(move |plane| (layer, plane)));
    let places = || all().flat_map(|(layer, plane)| (0..tokens).map(move |token| (layer, plane, token)));
    let rows = |side: (&Served, &[BlockId]), (layer, plane, token): (usize, usize, usize)| {
        let range = place(side, layer, plane, token);
        Rows::run(range.start, range.len())
    };
    // The pools may be remote: all operations of a kind run at the same time.
    let reads: Vec<_> = places().map(|at| from.0.memory.read(rows(from, at), Vec::new())).collect();
    let deadline = Instant::now() + FOREVER;
    let write = |(at, read): ((usize, usize, usize), Pending<Vec<u8>>)| {
        to.0.memory.write(rows(to, at), read.wait(deadline).unwrap())
    };
    let writes: Vec<_> = places().zip(reads).map(write).collect();
    writes.into_iter().for_each(|write| drop(write.wait(deadline).unwrap()));
}

#[test]
fn a_sequence_handed_over_has_the_bits_it_has_alone() {
    let expected = alone(MODEL);
    let source =
        serve(Setup { model: MODEL, block_tokens: 32, blocks: 40, chunk: 48, running: 4, threads: 2, lagging: true });
    let sink =
        serve(Setup { model: MODEL, block_tokens: 16, blocks: 40, chunk: 16, running: 4, threads: 1, lagging: false });
    let prefills: Vec<_> = requests()
        .into_iter()
        .map(|request| {
            let blocks = Kept::default();
            (submit(&source, request, Run::PrefillOnly { observer: Box::new(blocks.clone()) }), blocks)
        })
        .collect();
    for (((running, blocks), mut request), expected) in prefills.into_iter().zip(requests()).zip(&expected) {
        let mut output = finish(running);
        let from = blocks.0.lock().unwrap().take().expect("blocks");
        let to = sink.engine.reserve(request.prompt_len, &[]).expect("room");
        copy((&source, &from.blocks().0[0]), (&sink, &to.blocks().0[0]), request.prompt_len);
        request.tokens.push(output[0].0);
        output.extend(finish(submit(&sink, request, Run::Adopted { lease: to, turn: None })));
        assert_eq!(&output, expected);
    }
    assert_eq!((source.engine.pool().counts().referenced, sink.engine.pool().counts().referenced), (0, 0));
}
