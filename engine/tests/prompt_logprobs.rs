//! Log-probabilities of prompts, of the whole engine over a real (small, random) model: their bits are those of the scalar reference and of
//! generation, whatever runs beside, is cached, or is preempted.

mod common;

use baton_engine::formats::{ModelSource, RandomModel};
use baton_engine::{Engine, EngineConfig, EngineHandle, Model, Run, SequenceControl, SequenceEvent, SequenceRequest};
use baton_kernels::cpu::{CpuConfig, CpuDevice};
use baton_kernels::device::Device;
use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::reference::ReferenceDevice;
use baton_types::{KvPoolMap, SamplingParams, TokenId};
use common::{Bits, FOREVER, Kept, Sink, bits, cached};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

const MODEL: &str = "random:hidden=198,layers=2,heads=6,kv_heads=2,head_dim=34,ffn=331,vocab=301,context=320,seed=5";
const TOP: u32 = 3;

#[derive(Clone, Copy, Debug)]
struct Setup {
    block_tokens: u32,
    blocks: u32,
    chunk: usize,
    running: usize,
    lagging: bool,
    scalar: bool,
}

const ALONE: Setup = Setup { block_tokens: 16, blocks: 32, chunk: 320, running: 1, lagging: false, scalar: true };

fn serve(setup: Setup) -> EngineHandle {
    let source = RandomModel::parse(MODEL).unwrap();
    let config = EngineConfig {
        model_len_max: source.spec().context,
        chunk_tokens_max: setup.chunk,
        running_max: setup.running,
        watermark_blocks: 0,
        ..EngineConfig::default()
    };
    let cpu = CpuDevice::new(CpuConfig { threads: 2, ..CpuConfig::default() }).unwrap();
    let device: Arc<dyn Device> = match setup {
        Setup { scalar: true, .. } => ReferenceDevice::new(cpu.info().numerics),
        Setup { lagging: true, .. } => Lagging::new(cpu, LagConfig::default()),
        _ => cpu,
    };
    let model = Model::load(&source, device.as_ref(), config.model_config(), &|_| ()).unwrap();
    let map = KvPoolMap::try_new(model.layout(setup.block_tokens).unwrap(), setup.blocks).unwrap();
    let memory = device.alloc_pool(&map).unwrap();
    Engine::start(model, memory, &map, config).unwrap()
}

#[derive(Debug, Default, PartialEq)]
struct Output {
    prompt: Vec<Bits>,
    ranks: Vec<u32>,
    answer: Vec<Bits>,
    /// Largest part of the prompt that came at once.
    part_max: usize,
    cached: usize,
}

type Running = (SequenceControl, Receiver<SequenceEvent>);

fn submit(engine: &EngineHandle, request: SequenceRequest, run: Run) -> Running {
    let (sender, events) = channel();
    (engine.submit(request, run, Box::new(Sink(sender))).unwrap(), events)
}

fn finish((_control, events): Running) -> Output {
    let mut output = Output::default();
    loop {
        match events.recv_timeout(FOREVER).expect("an event") {
            SequenceEvent::Started { .. } => {}
            SequenceEvent::Prompt(part) => {
                assert!(output.answer.is_empty(), "the prompt comes before the answer");
                assert_eq!(part.first as usize, output.prompt.len() + 1, "each token once, in order");
                output.part_max = output.part_max.max(part.tokens.len());
                output.prompt.extend(part.tokens.iter().map(|token| bits(token.token, &token.logprobs)));
                output.ranks.extend(part.tokens.iter().map(|token| token.rank));
            }
            SequenceEvent::Token { token, logprobs, reuse, .. } => {
                output.cached += reuse.map_or(0, |reuse| reuse.cached_tokens);
                output.answer.push(bits(token, &logprobs.expect("log-probabilities were asked for")));
            }
            SequenceEvent::Prefilled { .. } | SequenceEvent::Finished { .. } => return output,
            SequenceEvent::Failed { message, .. } => panic!("{message}"),
        }
    }
}

fn request(i: usize, tokens: Vec<TokenId>, prompt_logprobs: Option<u32>) -> SequenceRequest {
    let sampling = SamplingParams {
        temperature: if i.is_multiple_of(2) { 0.0 } else { 1.3 },
        repetition_penalty: if i.is_multiple_of(3) { 1.2 } else { 1.0 },
        seed: i as u64,
        max_tokens: 20,
        logprobs: Some(TOP),
        prompt_logprobs,
        ..SamplingParams::default()
    };
    cached(common::request(format!("request-{i}"), tokens, sampling))
}

fn prompts() -> impl Iterator<Item = Vec<TokenId>> {
    let lengths = [1, 2, 16, 17, 33, 64, 65, 66, 130, 200];
    lengths.into_iter().enumerate().map(|(i, len)| (0..len).map(|t| ((t * t + 7 * i + 3) % 301) as TokenId).collect())
}

/// The outputs of the scalar reference, one request at a time.
fn alone() -> Vec<Output> {
    let engine = serve(ALONE);
    prompts().enumerate().map(|(i, tokens)| finish(submit(&engine, request(i, tokens, Some(TOP)), Run::Full))).collect()
}

#[test]
fn a_prompt_has_the_bits_it_has_alone_in_the_scalar_reference() {
    let expected = alone();
    let small = Setup { block_tokens: 16, blocks: 20, chunk: 7, running: 8, lagging: false, scalar: false };
    let setups = [
        small,
        Setup { blocks: 80, chunk: 64, running: 16, ..small },
        Setup { block_tokens: 64, blocks: 6, chunk: 50, ..small },
        Setup { chunk: 256, lagging: true, ..small },
        Setup { blocks: 80, chunk: 320, ..small },
    ];
    let (mut preemptions, mut cached) = (0, 0);
    for setup in setups {
        let engine = serve(setup);
        // In the second round, much of it is cached. The same prompt without log-probabilities may use that, this one may not.
        for round in 0..2 {
            let both = prompts().enumerate().map(|(i, tokens)| {
                let plain = submit(&engine, request(i, tokens.clone(), None), Run::Full);
                (submit(&engine, request(i, tokens, Some(TOP)), Run::Full), plain)
            });
            let both: Vec<_> = both.collect();
            for (i, ((scored, plain), expected)) in both.into_iter().zip(&expected).enumerate() {
                let (scored, plain) = (finish(scored), finish(plain));
                let what = format!("request {i} in round {round} with {setup:?}");
                assert_eq!((&scored.prompt, &scored.ranks), (&expected.prompt, &expected.ranks), "{what}");
                assert_eq!((&scored.answer, &plain.answer), (&expected.answer, &expected.answer), "{what}");
                assert_eq!((scored.cached, plain.prompt.len()), (0, 0), "{what}");
                assert!(scored.part_max <= 64.min(setup.chunk), "{} rows' logits came back: {what}", scored.part_max);
                cached += plain.cached;
            }
        }
        preemptions += engine.load().preemptions;
        assert_eq!(engine.pool().counts().referenced, 0);
    }
    assert!(preemptions > 0, "some of these pools are too small for all at once");
    assert!(cached > 0, "nothing was found cached");
}

#[test]
fn an_answer_given_back_has_the_log_probabilities_with_which_it_was_generated() {
    let engine = serve(Setup { blocks: 80, chunk: 48, running: 4, scalar: false, ..ALONE });
    for (i, tokens) in prompts().enumerate() {
        let generated = finish(submit(&engine, request(i, tokens.clone(), None), Run::Full));
        let answer = generated.answer.iter().map(|(token, ..)| *token);
        let whole = tokens.iter().copied().chain(answer).collect();
        let scored = finish(submit(&engine, request(i, whole, Some(TOP)), Run::Full));
        assert_eq!(scored.prompt.len(), tokens.len() - 1 + generated.answer.len());
        assert_eq!(scored.prompt[tokens.len() - 1..], generated.answer, "request {i}");
        for ((token, _, top), rank) in scored.prompt.iter().zip(&scored.ranks) {
            let place = top.iter().position(|(other, _)| other == token);
            assert_eq!(place, (*rank as usize).checked_sub(1).filter(|place| *place < TOP as usize));
        }
    }
}

#[test]
fn a_prefill_reports_the_prompt_and_a_continued_one_the_prompt_alone() {
    let expected = alone();
    let engine = serve(Setup { block_tokens: 32, blocks: 40, chunk: 48, scalar: false, ..ALONE });
    for ((i, tokens), expected) in prompts().enumerate().zip(&expected) {
        let run = || Run::PrefillOnly { observer: Box::new(Kept::default()) };
        let output = finish(submit(&engine, request(i, tokens.clone(), Some(TOP)), run()));
        assert_eq!((&output.prompt, &output.answer[..]), (&expected.prompt, &expected.answer[..1]), "request {i}");
        // Some tokens were generated before a worker failed; what it owed of the prompt is still to come.
        let mut resumed = request(i, tokens, Some(TOP));
        resumed.tokens.extend(expected.answer[..3].iter().map(|(token, ..)| *token));
        resumed.prefix = None;
        let output = finish(submit(&engine, resumed, run()));
        assert_eq!((&output.prompt, &output.answer[..]), (&expected.prompt, &expected.answer[3..4]), "request {i}");
    }
}
