//! Decode of a batch in which each sequence has another LoRA adapter, against the same batch without adapters.

use crate::THREADS;
use crate::compute::{BATCH, DECODE_PROMPT, DECODE_TOKENS, Output, Sequence, prompt, submit};
use crate::statistics::best;
use crate::summary::{Figure, Summary, Target};
use anyhow::ensure;
use baton_engine::AdapterUse;
use baton_node::TokioRuntime;
use baton_tests::adapters::write_peft_folder;
use baton_types::{AdapterCard, Runtime, TenantLabel};
use baton_worker::bring_up;
use baton_worker::lora::{Adapters, LoraSettings};
use baton_worker::settings::{EngineSettings, ModelSettings, SpeculationSettings};
use std::sync::Arc;
use std::time::{Duration, Instant};

const ADAPTERS: usize = 64;
const RANK: usize = 8;
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Each round takes the next 8 of the 64 adapters: they are loaded before, in place of others.
pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("adapters over the default model on {THREADS} threads");
    let folder = tempfile::tempdir()?;
    let lora = LoraSettings { folder: Some(folder.path().to_owned()), max_loras: BATCH, ..LoraSettings::default() };
    let speculation = SpeculationSettings::off();
    let settings =
        EngineSettings { threads: THREADS.into(), lora: lora.clone(), speculation, ..EngineSettings::default() };
    let loaded = bring_up::load(&ModelSettings::default(), &settings, &|_, _| ())?;
    for adapter in 0..ADAPTERS {
        write_peft_folder(&folder.path().join(format!("{adapter:02}")), &loaded.spec, RANK, adapter as u64)?;
    }
    let tokio = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let _entered = tokio.enter();
    let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current());
    let adapters = Adapters::start(&lora, &loaded.engine, loaded.spec.clone(), Vec::new(), runtime)?;
    let adapters = adapters.ok_or_else(|| anyhow::anyhow!("the folder is set"))?;
    let cards = adapters.cards().borrow().clone();
    ensure!(cards.len() == ADAPTERS, "{} adapters", cards.len());
    let hold = |card: &AdapterCard| {
        tokio.block_on(adapters.hold(card.digest, TenantLabel::default(), Instant::now() + WAIT_MAX))
    };

    let prompts: Vec<_> = (0..BATCH).map(|salt| prompt(DECODE_PROMPT, salt)).collect();
    let run = |held: Vec<Option<AdapterUse>>| -> anyhow::Result<Vec<Output>> {
        let sequences = prompts.iter().zip(held).map(|(p, adapter)| submit(&loaded.engine, p, DECODE_TOKENS, adapter));
        let sequences: Vec<Sequence> = sequences.collect::<Result<_, _>>()?;
        sequences.into_iter().map(Sequence::output).collect()
    };
    // The fastest step: other load on the machine falls on both kinds at random. Early steps still prefill the others.
    let rate = |outputs: &[Output]| BATCH as f64 / outputs[0].fastest_step_s(DECODE_TOKENS / 2);
    let (mut plain, mut adapted, mut loads) = (Vec::new(), Vec::new(), Vec::new());
    for cards in cards.chunks(BATCH) {
        let without = run(vec![None; BATCH])?;
        plain.push(rate(&without));
        let mut held = Vec::new();
        for card in cards {
            let since = Instant::now();
            held.push(hold(card)?);
            loads.push(since.elapsed().as_secs_f64());
        }
        let with = run(held.iter().cloned().map(Some).collect())?;
        adapted.push(rate(&with));
        let alone = submit(&loaded.engine, &prompts[0], DECODE_TOKENS, Some(held.swap_remove(0)))?.output()?;
        ensure!(alone.tokens == with[0].tokens, "other adapters in the batch change the answer: no figures");
        ensure!(with.iter().zip(&without).any(|(with, without)| with.tokens != without.tokens), "nothing is adapted");
    }
    let ratio = best(adapted.clone()) / best(plain);
    let of = "the same batch without adapters";
    summary.add("adapters_decode_b8", Figure::ratio(best(adapted), "tokens/s", ratio, of), Target::AtLeast(0.7));
    loads.sort_by(f64::total_cmp);
    summary.add("adapters_load", Figure::plain(1e3 * loads[loads.len() / 2], "ms"), None);
    ensure!(loaded.engine.stop(), "the engine does not stop");
    Ok(())
}
