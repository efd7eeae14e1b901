//! Round trips of every type that has a valid value, and a table of refusals.

use super::*;
use crate::v1;
use baton_types::*;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

fn name() -> impl Strategy<Value = String> {
    "[!-~]{1,40}"
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let floats =
        (0.0f32..=2.0, 0.001f32..=1.0, 0.0f32..=1.0, 0.001f32..=1.0, -2.0f32..=2.0, -2.0f32..=2.0, 0.1f32..=10.0);
    let ids = || vec(any::<u32>(), 0..4);
    let words = vec(vec(any::<u32>(), 1..4), 0..3);
    let constraints = (0u32..=1, btree_map(any::<u32>(), -100.0f32..=100.0, 0..4), ids(), words, grammar());
    let logprobs = (proptest::option::of(0u32..=20), proptest::option::of(0u32..=20));
    (floats, any::<(u32, u64, bool)>(), 1u32.., ids(), logprobs, constraints).prop_map(
        |(
            (temperature, top_p, min_p, typical_p, presence_penalty, frequency_penalty, repetition_penalty),
            (top_k, seed, ignore_eos),
            max_tokens,
            stop_token_ids,
            (logprobs, prompt_logprobs),
            (min_tokens, logit_bias, allowed_token_ids, bad_words, grammar),
        )| {
            SamplingParams {
                temperature,
                top_p,
                top_k,
                min_p,
                typical_p,
                bad_words,
                presence_penalty,
                frequency_penalty,
                repetition_penalty,
                seed,
                max_tokens,
                ignore_eos: ignore_eos && grammar.is_none(),
                stop_token_ids,
                logprobs,
                prompt_logprobs,
                min_tokens,
                logit_bias: logit_bias.into_iter().collect(),
                // A grammar takes their place.
                allowed_token_ids: if grammar.is_none() { allowed_token_ids } else { Vec::new() },
                grammar: grammar.map(Arc::new),
            }
        },
    )
}

fn grammar() -> impl Strategy<Value = Option<Grammar>> {
    let choice = vec(".{1,9}", 1..4).prop_map(Grammar::Choice);
    let piece = prop_oneof![".{1,9}".prop_map(GrammarPiece::Text), any::<u32>().prop_map(GrammarPiece::Token)];
    let pieces = || vec(piece.clone(), 0..3);
    let call = (pieces(), ".{0,9}", pieces()).prop_map(|(open, schema, close)| CallGrammar { open, schema, close });
    let around = (pieces(), option::of(pieces()), pieces());
    let calls = (vec(call, 1..4), around)
        .prop_map(|(calls, (open, separator, close))| Grammar::Calls(CallsGrammar { open, calls, separator, close }));
    proptest::option::of(prop_oneof![
        ".{1,9}".prop_map(Grammar::JsonSchema),
        ".{1,9}".prop_map(Grammar::Regex),
        ".{1,9}".prop_map(Grammar::Lark),
        choice,
        calls,
    ])
}

fn party() -> impl Strategy<Value = Party> {
    (name(), any::<u64>())
        .prop_map(|(id, n)| Party { instance: InstanceId::try_new(id).unwrap(), incarnation: Incarnation(n) })
}

fn sequence() -> impl Strategy<Value = SequenceSpec> {
    let cache = (vec(any::<u8>(), 0..=64), option::of(0u64..1 << 29), option::of(0u64..1 << 29), any::<bool>());
    let cache = cache.prop_map(|(salt, ttl, pin, cold)| CacheUse {
        salt,
        cold,
        ttl: ttl.map(Duration::from_millis),
        pin: pin.map(Duration::from_millis),
    });
    let share = (any::<u64>(), 1u32..=1000)
        .prop_map(|(tenant, weight)| Share { tenant: TenantLabel(tenant), weight: Weight::try_new(weight).unwrap() });
    let numbers = (any::<(u32, i32)>(), option::of(cache), share, any::<Option<[u8; 32]>>());
    (name(), vec(any::<u32>(), 1..50), any::<proptest::sample::Index>(), sampling(), numbers).prop_map(
        |(id, tokens, prompt, sampling, ((sample_index, priority), cache, share, adapter))| SequenceSpec {
            request_id: RequestId::try_new(id).unwrap(),
            prompt_len: 1 + prompt.index(tokens.len()),
            tokens,
            sampling,
            sample_index,
            priority,
            cache,
            share,
            adapter: adapter.map(Digest),
        },
    )
}

fn card() -> impl Strategy<Value = ModelCard> {
    let numbers = (1u32.., 1u32.., vec(any::<u32>(), 0..4), any::<[u8; 32]>(), any::<Option<[u8; 32]>>());
    let defaults = (proptest::option::of(0.0f32..2.0), proptest::option::of(0.1f32..1.0), any::<Option<u32>>());
    (name(), vec(name(), 0..4), "[a-f0-9]{0,12}", numbers, defaults).prop_map(
        |(
            id,
            served_names,
            revision,
            (context_max, vocab, end_tokens, fingerprint, bundle),
            (temperature, top_p, top_k),
        )| ModelCard {
            id,
            served_names,
            revision,
            fingerprint: Digest(fingerprint),
            context_max,
            vocab,
            end_tokens,
            defaults: SamplingDefaults { temperature, top_p, top_k, repetition_penalty: None },
            bundle: bundle.map(Digest),
        },
    )
}

fn record() -> impl Strategy<Value = InstanceRecord> {
    let layout = (1u32..8, 1u32..40, 1u32..9)
        .prop_map(|(blocks, layers, heads)| KvLayout::llama(16 * blocks, layers, heads, 64, Dtype::Bf16).unwrap());
    let shard = (vec(any::<u8>(), 0..64), 0u32..9, 1u32..9).prop_map(|(transfer_address, start, len)| Shard {
        transfer_address,
        layers: start..start + len,
        kv_heads: 0..len,
    });
    let lists = (btree_map(name(), "[ -~]{0,20}", 0..4), vec(shard, 1..3), vec(name(), 0..3));
    (party(), any::<bool>(), name(), 1u16.., card(), layout, lists, any::<(u64, u32, u32)>()).prop_map(
        |(
            party,
            prefill,
            pool,
            port,
            card,
            layout,
            (labels, shards, capabilities),
            (capacity_tokens, running_max, waiting_max),
        )| InstanceRecord {
            party,
            role: if prefill { Role::Prefill } else { Role::Decode },
            labels,
            pool,
            endpoint: format!("[::1]:{port}"),
            card,
            protocol: ProtocolRange { min: 1, max: 2 },
            layout,
            class: NumericsClass {
                order: "f32fma".into(),
                weights: Dtype::Bf16.into(),
                kv: Dtype::F16,
                kernel_revision: 3,
            },
            capacity_tokens,
            running_max,
            waiting_max,
            shards,
            capabilities,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn sequences_survive_the_wire(sequence in sequence()) {
        let bytes = prost::Message::encode_to_vec(&v1::Sequence::from(sequence.clone()));
        let message: v1::Sequence = prost::Message::decode(bytes.as_slice()).unwrap();
        prop_assert_eq!(SequenceSpec::try_from(message).unwrap(), sequence);
    }

    #[test]
    fn records_survive_the_wire(record in record()) {
        let bytes = prost::Message::encode_to_vec(&v1::InstanceRecord::from(record.clone()));
        let message: v1::InstanceRecord = prost::Message::decode(bytes.as_slice()).unwrap();
        prop_assert_eq!(InstanceRecord::try_from(message).unwrap(), record);
    }

    #[test]
    fn reports_survive_the_wire(numbers in any::<[u32; 5]>(), times in any::<[Option<u64>; 7]>(), top in vec(any::<(u32, i16)>(), 0..20)) {
        let [prompt_tokens, completion_tokens, cached_tokens, cache_write_tokens, recomputed_tokens] = numbers;
        let usage = Usage { prompt_tokens, completion_tokens, cached_tokens, cache_write_tokens, recomputed_tokens };
        prop_assert_eq!(Usage::from(v1::Usage::from(usage)), usage);
        let [queue_us, prefill_us, transfer_us, exposed_us, transfer_bytes, ttft_us, decode_us] = times;
        let timings = PhaseTimings { queue_us, prefill_us, transfer_us, exposed_us, transfer_bytes, ttft_us, decode_us };
        prop_assert_eq!(PhaseTimings::from(v1::Timings::from(timings)), timings);
        let logprobs = TokenLogprobs { chosen: -0.5, top: top.into_iter().map(|(id, p)| (id, p.into())).collect() };
        prop_assert_eq!(TokenLogprobs::try_from(v1::Logprobs::from(logprobs.clone())).unwrap(), logprobs);
    }

    #[test]
    fn events_survive_the_wire(numbers in any::<[u64; 5]>(), counts in any::<[Option<u64>; 4]>(), flags in any::<[bool; 2]>(), id in any::<u32>()) {
        let [queue_us, transfer_us, exposed_us, transfer_bytes, total] = numbers;
        let token = GeneratedToken {
            id,
            logprobs: flags[0].then(|| TokenLogprobs { chosen: -0.5, top: vec![(id, -1.0)] }),
            finish: flags[1].then_some(FinishReason::Length),
            prefill_us: counts[0],
            cached_tokens: counts[1].map(|_| id),
            cache_write_tokens: None,
        };
        let adopted = DecodeEvent::Adopted { bytes: transfer_bytes, await_us: queue_us };
        let scored = PromptLogprob { token: id, rank: id, logprobs: token.logprobs.clone().unwrap_or_default() };
        let part = PromptLogprobs { first: id.max(1), tokens: vec![scored; usize::from(flags[1])] };
        for event in [DecodeEvent::Prompt(part.clone()), DecodeEvent::Claimed, DecodeEvent::Started { queue_us }, adopted, DecodeEvent::Waits, DecodeEvent::Token(token.clone())] {
            prop_assert_eq!(DecodeEvent::try_from(v1::DecodeEvent::from(event.clone())).unwrap(), event);
        }
        let done = TransferReport { prefill_us: queue_us, transfer_us, exposed_us, transfer_bytes, transport: "tcp".into() };
        for event in [PrefillEvent::Prompt(part), PrefillEvent::Started { queue_us }, PrefillEvent::Token(token), PrefillEvent::Done(done)] {
            prop_assert_eq!(PrefillEvent::try_from(v1::PrefillEvent::from(event.clone())).unwrap(), event);
        }
        let load = LoadReport {
            waiting: id,
            waiting_tokens: queue_us,
            blocks: flags[0].then_some(BlockCounts { total, free: exposed_us, ..Default::default() }),
            healthy: flags[1],
            generated_tokens: counts[2],
            still_ms: counts[3],
            lacks_blocks: Some(flags[0]),
            ..Default::default()
        };
        prop_assert_eq!(LoadReport::from(v1::LoadReport::from(load.clone())), load);
    }

    #[test]
    fn errors_survive_as_statuses(kind in 0..ErrorKind::ALL.len(), message in "\\PC{0,200}", param in proptest::option::of("\\PC{1,40}"), wait in any::<Option<u32>>()) {
        let retry_after = wait.map(|ms| Duration::from_millis(ms.into()));
        let error = RequestError { kind: ErrorKind::ALL[kind], message, param, retry_after };
        let status = status::from_error(&error);
        prop_assert_eq!(status.code() as i32, error.kind.grpc_code());
        // Over the wire: headers out, headers in.
        let mut headers = http::HeaderMap::new();
        status.add_header(&mut headers).unwrap();
        let received = tonic::Status::from_header_map(&headers).unwrap();
        prop_assert_eq!(status::to_error(&received), error);
    }
}

#[test]
fn parts_of_prompts_have_bounds() {
    let token = || v1::PromptLogprob { token_id: 1, rank: 1, logprobs: Some(v1::Logprobs::default()) };
    let refused =
        |first, tokens: Vec<v1::PromptLogprob>| PromptLogprobs::try_from(v1::PromptLogprobs { first, tokens }).is_err();
    assert!(!refused(1, vec![token(); PromptLogprobs::TOKENS_MAX]));
    assert!(refused(1, vec![token(); PromptLogprobs::TOKENS_MAX + 1]));
    assert!(refused(0, vec![token()]), "the first token has none");
    assert!(refused(1, vec![v1::PromptLogprob { logprobs: None, ..token() }]));
    let top = vec![v1::TopLogprob::default(); 21];
    assert!(refused(1, vec![v1::PromptLogprob { logprobs: Some(v1::Logprobs { chosen: 0.0, top }), ..token() }]));
}

#[test]
fn long_messages_are_cut_at_a_character() {
    let status = status::from_error(&RequestError::new(ErrorKind::Internal, "é".repeat(2000)));
    assert_eq!(status.message().len(), status::MESSAGE_BYTES_MAX);
    let odd = status::from_error(&RequestError::new(ErrorKind::Internal, format!("x{}", "é".repeat(2000))));
    assert_eq!(odd.message().len(), status::MESSAGE_BYTES_MAX - 1);
}

#[test]
fn statuses_that_nobody_stated_are_judged_by_their_origin() {
    let kind = |status: tonic::Status| status::to_error(&status).kind;
    assert_eq!(kind(tonic::Status::unknown("?")), ErrorKind::Internal);
    assert_eq!(kind(tonic::Status::not_found("no such method")), ErrorKind::ModelNotFound);
    assert_eq!(kind(tonic::Status::cancelled("client went away")), ErrorKind::Cancelled);
    assert_eq!(kind(tonic::Status::cancelled("Timeout expired")), ErrorKind::DeadlineExceeded);
    assert_eq!(kind(tonic::Status::from_error(Box::new(tonic::TimeoutExpired(())))), ErrorKind::DeadlineExceeded);
    let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
    assert_eq!(kind(tonic::Status::from_error(Box::new(broken))), ErrorKind::Unavailable);
    assert!(status::stated_error(&tonic::Status::unavailable("proxy")).is_none());
}

fn a_record() -> v1::InstanceRecord {
    let card = ModelCard {
        id: "m".into(),
        served_names: vec!["m".into()],
        revision: String::new(),
        fingerprint: Digest([7; 32]),
        context_max: 8,
        vocab: 9,
        end_tokens: vec![2],
        defaults: SamplingDefaults::default(),
        bundle: None,
    };
    InstanceRecord {
        party: Party { instance: InstanceId::try_new("i").unwrap(), incarnation: Incarnation(1) },
        role: Role::Decode,
        labels: Default::default(),
        pool: "default".into(),
        endpoint: "127.0.0.1:7000".into(),
        card,
        protocol: ProtocolRange { min: 1, max: 1 },
        layout: KvLayout::llama(16, 2, 3, 64, Dtype::Bf16).unwrap(),
        class: NumericsClass { order: "cpu".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 1 },
        capacity_tokens: 64,
        running_max: 1,
        waiting_max: 1,
        shards: vec![Shard { transfer_address: vec![1], layers: 0..2, kv_heads: 0..3 }],
        capabilities: vec![],
    }
    .into()
}

#[test]
fn refused_records_name_the_field() {
    let check = |field: &str, change: fn(&mut v1::InstanceRecord)| {
        let mut record = a_record();
        change(&mut record);
        assert_eq!(InstanceRecord::try_from(record).unwrap_err().field(), field);
    };
    check("party", |r| r.party = None);
    check("party.instance", |r| r.party.as_mut().unwrap().instance = "two words".into());
    check("role", |r| r.role = 0);
    check("role", |r| r.role = 9);
    check("labels", |r| r.labels = (0..65).map(|i| (i.to_string(), String::new())).collect());
    check("labels", |r| r.labels = [(String::new(), "x".into())].into());
    check("pool", |r| r.pool.clear());
    check("endpoint", |r| r.endpoint = "host".into());
    check("endpoint", |r| r.endpoint = ":80".into());
    check("endpoint", |r| r.endpoint = "host:0".into());
    check("card.id", |r| r.card.as_mut().unwrap().id = "x".repeat(257));
    check("card.served_names[1]", |r| r.card.as_mut().unwrap().served_names.push("a\nb".into()));
    check("card.fingerprint", |r| r.card.as_mut().unwrap().fingerprint = vec![1, 2].into());
    check("card.bundle", |r| r.card.as_mut().unwrap().bundle = vec![1, 2].into());
    check("card.context_max", |r| r.card.as_mut().unwrap().context_max = 0);
    check("card.defaults.top_p", |r| {
        r.card.as_mut().unwrap().defaults = Some(v1::SamplingDefaults { top_p: Some(7.0), ..Default::default() })
    });
    check("protocol.min", |r| r.protocol = Some(v1::ProtocolRange { min: 3, max: 2 }));
    check("layout", |r| r.layout = r#"{"block_tokens":7,"groups":[]}"#.into());
    check("layout", |r| r.layout = " ".repeat(LAYOUT_BYTES_MAX + 1));
    check("class.kv", |r| r.class.as_mut().unwrap().kv = "int3".into());
    check("shards", |r| r.shards.clear());
    check("shards", |r| r.shards = vec![r.shards[0].clone(); SHARDS_MAX + 1]);
    check("shards[0].layers", |r| r.shards[0].layer_end = 0);
    check("shards[0].transfer_address", |r| r.shards[0].transfer_address = vec![0; ADDRESS_BYTES_MAX + 1].into());
    assert!(InstanceRecord::try_from(a_record()).is_ok());
}

#[test]
fn refused_sequences_name_the_field() {
    let check = |field: &str, change: fn(&mut v1::Sequence)| {
        let sampling = Some(SamplingParams::default().into());
        let mut sequence =
            v1::Sequence { request_id: "r".into(), tokens: vec![1, 2], prompt_len: 2, sampling, ..Default::default() };
        change(&mut sequence);
        assert_eq!(SequenceSpec::try_from(sequence).unwrap_err().field(), field);
    };
    check("request_id", |s| s.request_id.clear());
    check("tokens", |s| s.tokens = vec![0; TOKENS_MAX + 1]);
    check("prompt_len", |s| s.prompt_len = 0);
    check("prompt_len", |s| s.prompt_len = 3);
    check("sampling", |s| s.sampling = None);
    check("sampling.top_p", |s| s.sampling.as_mut().unwrap().top_p = f32::NAN);
    check("share.weight", |s| s.share = Some(v1::Share { tenant: 1, weight: 0 }));
    check("share.weight", |s| s.share = Some(v1::Share { tenant: 1, weight: 1001 }));
    check("adapter", |s| s.adapter = vec![1; 31].into());
}

#[test]
fn announced_adapters_are_checked() {
    let card = |name: &str| AdapterCard { name: name.into(), digest: Digest([3; 32]) };
    let cards = vec![card("support-v2"), card("org/sql@main")];
    assert_eq!(Vec::<AdapterCard>::try_from(v1::Adapters::from(&cards[..])), Ok(cards));
    let refused = |name: &str, digest: usize, count: usize| {
        let adapter = v1::Adapter { name: name.into(), digest: vec![3; digest].into() };
        Vec::<AdapterCard>::try_from(v1::Adapters { adapters: vec![adapter; count] }).unwrap_err().field().to_owned()
    };
    for name in ["", "a b", "a\n", &"x".repeat(257)] {
        assert_eq!(refused(name, 32, 1), "adapters.name");
    }
    assert_eq!(refused("a", 31, 1), "adapters.digest");
    assert_eq!(refused("a", 32, AdapterCard::COUNT_MAX + 1), "adapters");
}

#[test]
fn sequences_of_routers_that_know_no_shares_are_everybodys() {
    let sampling = Some(SamplingParams::default().into());
    let sequence =
        v1::Sequence { request_id: "r".into(), tokens: vec![1], prompt_len: 1, sampling, ..Default::default() };
    assert_eq!(SequenceSpec::try_from(sequence).unwrap().share, Share::default());
}

#[test]
fn a_refusal_becomes_an_invalid_request_with_its_field() {
    let error =
        SequenceSpec::try_from(v1::Sequence { tokens: vec![1], prompt_len: 2, ..Default::default() }).unwrap_err();
    let error = status::to_error(&error.within("sequence").into());
    assert_eq!((error.kind, error.param.as_deref()), (ErrorKind::InvalidRequest, Some("sequence.prompt_len")));
}

#[test]
fn unknown_finish_reasons_are_refused() {
    assert!(finish_reason(17).is_err());
    for reason in [None, Some(FinishReason::Stop), Some(FinishReason::Length), Some(FinishReason::Cancelled)] {
        assert_eq!(finish_reason(finish_reason_code(reason)).unwrap(), reason);
    }
}
