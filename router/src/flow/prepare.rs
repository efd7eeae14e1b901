//! From a request to tokens: all steps before workers are involved, and the admission queue.

use super::core::Core;
use super::hashes::prompt_hashes;
use super::tokenize::{Tokenized, Work};
use crate::admission::Slot;
use crate::models::{Named, lookup};
use crate::output::{Choices, PROMPT_PART_TOKENS_MAX, prompt_logprob_bytes};
use crate::placement::Reason;
use crate::quotas::Quota;
use crate::request::{
    AskedGrammar, BadWords, Parameters, PrefillPolicy, Prompt, Request, Sampling, check_tokens, check_vocab, label_of,
};
use crate::workers::ServedModel;
use baton_kv_cache::PrefixHash;
use baton_types::{
    AdapterCard, CacheUse, ErrorKind, Grammar, ModelCard, RequestError, SamplingParams, TenantId, TokenId, shown,
};
use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tracing::{Instrument, Span};

/// A request after validation and tokenization. Its own `sampling` and `cache` are the resolved ones.
#[derive(Debug)]
pub struct Prepared {
    request: Request,
    pub(crate) model: Arc<ServedModel>,
    /// The adapter that computes it, by the digest that was served when it came: every attempt has this one.
    pub(crate) adapter: Option<AdapterCard>,
    /// Its prompts, at least one. Each has as many answers as there are samples.
    pub(crate) prompts: Vec<PreparedPrompt>,
    /// How it uses prefix caches; `None` shares nothing.
    pub(crate) cache: Option<CacheUse>,
    /// Complete, including the drawn seed if none was given. Its `max_tokens` are those of the first prompt.
    pub sampling: SamplingParams,
    /// Where its prompt is prefilled.
    pub(crate) policy: PrefillPolicy,
    /// Why its first attempt ran where it did.
    pub(crate) placed: OnceLock<Reason>,
}

/// One prompt of a request.
#[derive(Debug)]
pub(crate) struct PreparedPrompt {
    pub(crate) tokens: Arc<[TokenId]>,
    /// Hashes of its cacheable blocks.
    pub(crate) hashes: Arc<[PrefixHash]>,
    /// Most tokens of each of its answers. 0: workers sample one, which is left out.
    pub(crate) max_tokens: u32,
    /// Its text, where answers begin with it.
    pub(crate) text: Arc<str>,
}

impl Prepared {
    /// The prompt; of several, the first.
    pub(crate) fn prompt(&self) -> &PreparedPrompt {
        &self.prompts[0]
    }

    /// How its answers are counted.
    pub(crate) fn choices(&self) -> Choices {
        Choices { prompts: self.prompts.len() as u32, samples: self.samples }
    }

    /// Tokens of all its prompts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }

    /// Tokens of its prompt; of several, those of the first.
    #[doc(hidden)] // For simulations.
    pub fn tokens(&self) -> &[TokenId] {
        &self.prompt().tokens
    }

    /// Hashes of the cacheable blocks of its prompt; of several, those of the first.
    #[doc(hidden)] // For simulations.
    pub fn hashes(&self) -> &[PrefixHash] {
        &self.prompt().hashes
    }

    /// Upper bound on the memory of what it reports of its prompts, while at most so many events wait for their reader.
    pub(crate) fn prompt_parts_bytes(&self, events_max: usize) -> u64 {
        let Some(top) = self.sampling.prompt_logprobs else { return 0 };
        self.prompt_tokens().min(events_max * PROMPT_PART_TOKENS_MAX) as u64 * prompt_logprob_bytes(top as usize)
    }

    /// The name of what answers: the adapter, or the model by its first public name.
    pub(crate) fn served_name(&self) -> &str {
        self.adapter.as_ref().map_or(self.model.card.public_name(), |adapter| &adapter.name)
    }

    /// Control tokens by which the parts of its answer are told apart: its text has them.
    pub(crate) fn marks(&self) -> Arc<[TokenId]> {
        let Some(text) = &self.model.text else { return Arc::default() };
        let Some(format) = text.answer_format() else { return Arc::default() };
        format.marks(self.tools.is_some()).filter_map(|mark| text.token_id(mark)).collect()
    }

    /// Name of the reason why its first attempt ran where it did.
    #[doc(hidden)] // For simulations.
    pub fn placed(&self) -> Option<&'static str> {
        self.placed.get().map(|reason| reason.name())
    }
}

impl Deref for Prepared {
    type Target = Request;

    fn deref(&self) -> &Request {
        &self.request
    }
}

/// A prepared request, and the resources that it holds until it ends.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) request: Arc<Prepared>,
    /// One for each answer.
    pub(super) slots: Vec<Slot>,
    pub(super) quota: Quota,
}

/// Refuses a grammar whose answers could not end.
fn check_ends(request: &Request, card: &ModelCard) -> Result<(), RequestError> {
    match &request.sampling.grammar {
        Some(AskedGrammar { param, .. }) if card.end_tokens.is_empty() => {
            Err(RequestError::invalid(*param, "this model has no end token, so its answers can follow no grammar"))
        }
        _ => Ok(()),
    }
}

/// Binds an answer that must call tools to calls in the notation of its model.
fn require_calls(parameters: &mut Parameters, model: &ServedModel) -> Result<(), RequestError> {
    let Some(tools) = &mut parameters.tools else { return Ok(()) };
    // Without text or template the chat is refused as such.
    let Some((text, format)) = model.text.as_ref().and_then(|text| Some((text, text.answer_format()?))) else {
        return Ok(());
    };
    let grammar = tools.grammar(format.calls, |token| text.token_id(token))?;
    tools.keep_names();
    if let Some(grammar) = grammar {
        parameters.sampling.grammar = Some(AskedGrammar { grammar: Arc::new(grammar), param: "tools" });
    }
    Ok(())
}

/// Drops what the request does not keep of long prompts.
fn truncate(parameters: &Parameters, prompts: &mut [Vec<TokenId>], model: &ServedModel) {
    let Some(truncate) = parameters.truncate else { return };
    for tokens in prompts {
        truncate.apply(tokens, &parameters.sampling, model.tokens_max);
    }
}

/// The text of a prompt as answers show it: as it was given, else that of its tokens, control tokens included.
fn echoed(given: Option<Arc<str>>, tokens: &[TokenId], model: &ServedModel) -> Arc<str> {
    given.unwrap_or_else(|| model.text.as_ref().map_or_else(Arc::default, |text| text.decode(tokens).into()))
}

/// The error of one of several prompts tells which.
pub(super) fn of_prompt(at: usize, prompts: u32, error: RequestError) -> RequestError {
    match error.param.as_deref() {
        Some("prompt") if prompts > 1 => error.param(format!("prompt[{at}]")),
        _ => error,
    }
}

impl Core {
    /// Checks, admits and tokenizes.
    pub(super) async fn prepare(
        &self,
        mut request: Request,
        prompt: Prompt,
        span: &Span,
    ) -> Result<Admitted, RequestError> {
        if self.draining.is_cancelled() {
            let message = "this router is draining; send the request to another";
            return Err(RequestError::new(ErrorKind::Unavailable, message));
        }
        if request.deadline <= self.runtime.now() {
            let message = "the deadline had passed when the request came";
            return Err(RequestError::new(ErrorKind::DeadlineExceeded, message));
        }
        let prompts = prompt.count();
        request.check(prompts)?;
        let answers = prompts * request.samples;
        let cache = self.cache.resolve(&request.tenant, &request.cache)?;
        let key = request.key.as_ref();
        let mut quota = self.quotas.enter(key, answers, request.priority)?;
        let key = key.map(|key| key.id);
        let slots = self.admission.enter_all(answers, request.priority, key, request.share())?;

        let Named { model, adapter } = self.named(&request.model, request.deadline).await?;
        let served = adapter.as_ref().map_or(model.card.public_name(), |adapter| &adapter.name);
        span.record("gen_ai.response.model", served);
        if model.text.is_none() && !request.stops.is_empty() {
            return Err(RequestError::invalid("stop", "this model has no text; use stop_token_ids"));
        }
        let Sampling { stop_token_ids, allowed_token_ids, logit_bias, .. } = &request.sampling;
        check_vocab("stop_token_ids", stop_token_ids, &model.card)?;
        check_vocab("allowed_token_ids", allowed_token_ids, &model.card)?;
        check_vocab("logit_bias", &logit_bias.iter().map(|(token, _)| *token).collect::<Vec<_>>(), &model.card)?;

        let tokenize = tracing::info_span!(parent: span, "tokenize");
        require_calls(&mut request.parameters, &model)?;
        check_ends(&request, &model.card)?;
        let grammar = request.sampling.grammar.clone();
        let is_form = grammar.as_ref().is_some_and(|asked| !matches!(*asked.grammar, Grammar::Calls(_)));
        let opens_content = is_form && matches!(prompt, Prompt::Chat { .. });
        // Of a longer prompt, only a part may be kept.
        let texts = match (request.echo, request.truncate) {
            (false, _) => Vec::new(),
            (true, None) => prompt.texts(),
            (true, Some(_)) => vec![None; prompts as usize],
        };
        let bad_words = std::mem::take(&mut request.parameters.sampling.bad_words);
        let (tenant, truncates) = (request.share().tenant, request.truncate.is_some());
        let work = Work { tenant, prompt, grammar, bad_words, truncates };
        let tokenized = self.tokenizing.run(&*self.runtime, work, &model, request.deadline, slots);
        let Tokenized { prompts: mut tokenized, bad_words, slots } = tokenized.instrument(tokenize).await?;
        if let Some(text) = model.text.as_ref().filter(|_| opens_content) {
            let opening = text.opens_content()?;
            tokenized.iter_mut().for_each(|tokens| tokens.extend_from_slice(&opening));
        }
        truncate(&request.parameters, &mut tokenized, &model);
        let texts = texts.into_iter().zip(&tokenized).map(|(text, tokens)| echoed(text, tokens, &model));
        let mut texts: VecDeque<Arc<str>> = texts.collect();
        let random = self.runtime.random();
        let resolve = |(at, tokens): (usize, &Vec<TokenId>)| {
            let resolved = check_tokens(tokens, &model.card)
                .and_then(|()| request.sampling.resolve(&model.card.defaults, tokens.len(), model.tokens_max, random));
            resolved.map_err(|error| of_prompt(at, prompts, error))
        };
        let resolved = tokenized.iter().enumerate().map(resolve).collect::<Result<Vec<_>, _>>()?;
        let is_empty = request.sampling.is_empty();
        let most = resolved.iter().map(|sampling| if is_empty { 0 } else { sampling.max_tokens });
        let most: Vec<u32> = most.collect();
        let no_prompt = || RequestError::invalid("prompt", "the prompt is empty; give at least one token");
        let sampling = SamplingParams { bad_words, ..resolved.into_iter().next().ok_or_else(no_prompt)? }.try_new()?;
        sampling.check_ends(&model.card.end_tokens)?;
        let takes =
            |(tokens, max): (&Vec<TokenId>, &u32)| tokens.len() as u64 + u64::from(request.samples) * u64::from(*max);
        quota.add_tokens(tokenized.iter().zip(&most).map(takes).sum())?;
        span.record("gen_ai.request.max_tokens", most.iter().copied().max());
        span.record("gen_ai.request.temperature", f64::from(sampling.temperature));
        span.record("gen_ai.request.top_p", f64::from(sampling.top_p));
        span.record("gen_ai.request.seed", sampling.seed);
        let (fingerprint, digest) = (&model.card.fingerprint, adapter.as_ref().map(|adapter| adapter.digest));
        let mut prompts = Vec::with_capacity(tokenized.len());
        for (tokens, max_tokens) in tokenized.into_iter().zip(most) {
            let tokens: Arc<[TokenId]> = tokens.into();
            let hashes = prompt_hashes(&*self.runtime, cache.as_ref(), fingerprint, digest, &tokens).await?;
            prompts.push(PreparedPrompt { tokens, hashes, max_tokens, text: texts.pop_front().unwrap_or_default() });
        }
        let policy = request.prefill_policy.unwrap_or(self.limits.policy);
        let placed = OnceLock::new();
        let request = Arc::new(Prepared { request, model, adapter, prompts, cache, sampling, policy, placed });
        Ok(Admitted { request, slots, quota })
    }

    /// The tokens of a prompt that is not run, and the model that they are for.
    pub(crate) async fn tokens_of(
        &self,
        tenant: &TenantId,
        parameters: &Parameters,
        prompt: Prompt,
        deadline: Instant,
    ) -> Result<(Vec<TokenId>, Arc<ServedModel>), RequestError> {
        if prompt.count() != 1 {
            return Err(RequestError::invalid("prompt", "prompt must be one prompt here; send a call for each"));
        }
        let model = self.served_model(&parameters.model, deadline).await?;
        let (tenant, truncates) = (label_of(tenant), parameters.truncate.is_some());
        let work = Work { tenant, prompt, grammar: None, bad_words: BadWords::default(), truncates };
        let Tokenized { mut prompts, .. } =
            self.tokenizing.run(&*self.runtime, work, &model, deadline, Vec::new()).await?;
        truncate(parameters, &mut prompts, &model);
        Ok((prompts.into_iter().flatten().collect(), model))
    }

    /// The requested model, or that of the requested adapter.
    pub(crate) async fn served_model(&self, name: &str, deadline: Instant) -> Result<Arc<ServedModel>, RequestError> {
        Ok(self.named(name, deadline).await?.model)
    }

    /// What the client's name for a model stands for. If no worker of it is ready, waits briefly: workers that were unreachable may return.
    async fn named(&self, name: &str, deadline: Instant) -> Result<Named, RequestError> {
        let until = deadline.min(self.runtime.now() + self.limits.retry.ready_max);
        loop {
            let now = self.runtime.now();
            match lookup(&self.workers.models(now), name) {
                Err(error) if error.kind == ErrorKind::Unavailable && now < until => {}
                Err(error) if error.kind == ErrorKind::ModelNotFound && self.workers.may_be_back(name, now) => {
                    if now >= until {
                        let message = format!("no decode worker of {} is ready to serve; try again later", shown(name));
                        return Err(RequestError::new(ErrorKind::Unavailable, message));
                    }
                }
                found => return found,
            }
            tokio::select! {
                biased;
                () = self.abort.cancelled() => {
                    return Err(RequestError::new(ErrorKind::Unavailable, "the router is stopping; send the request again"));
                }
                () = self.runtime.sleep(self.limits.retry.backoff_min) => {}
            }
        }
    }
}
