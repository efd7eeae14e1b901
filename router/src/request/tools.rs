//! Tools that an answer may call.

use baton_text::answer::{CallFormat, NotationPart};
use baton_text::grammar;
use baton_types::{CallGrammar, CallsGrammar, ErrorKind, Grammar, GrammarPiece, RequestError, TokenId};
use serde_json::Value;
use std::sync::Arc;

/// The tools of a request. At least one.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    pub(crate) list: Arc<Vec<Tool>>,
    pub(crate) choice: ToolChoice,
    /// Whether an answer may have several calls.
    pub(crate) is_parallel: bool,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// JSON Schema of its arguments.
    pub(crate) schema: Value,
    /// Whether what cannot be enforced of the schema is refused, where calls are enforced.
    pub(crate) is_strict: bool,
    /// All of it, for the template.
    pub(crate) spec: Value,
}

/// Whether tools are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    None,
    /// As the model likes.
    Auto,
    /// The answer is calls.
    Required,
    /// The answer is a call of this tool.
    Named(String),
}

impl Tools {
    /// The tools that may be called; `None` if there are none, or none may.
    ///
    /// # Errors
    /// If two have one name, or the choice names none of them.
    pub(crate) fn choose(
        list: Vec<Tool>,
        choice: Option<ToolChoice>,
        is_parallel: bool,
    ) -> Result<Option<Self>, RequestError> {
        if list.is_empty() {
            return match choice {
                None | Some(ToolChoice::None | ToolChoice::Auto) => Ok(None),
                Some(_) => {
                    let message = "tool_choice asks for a call, and there are no tools";
                    Err(RequestError::invalid("tool_choice", message))
                }
            };
        }
        if let Some(twice) = (1..list.len()).find(|at| list[..*at].iter().any(|tool| tool.name == list[*at].name)) {
            return Err(RequestError::invalid("tools", format!("two tools have the name {}", list[twice].name)));
        }
        match choice.unwrap_or(ToolChoice::Auto) {
            ToolChoice::None => Ok(None),
            ToolChoice::Named(name) if list.iter().all(|tool| tool.name != name) => {
                let message = format!("tool_choice names {name:.64}, which is none of the tools");
                Err(RequestError::invalid("tool_choice", message))
            }
            choice => Ok(Some(Self { list: Arc::new(list), choice, is_parallel })),
        }
    }

    /// Keeps the names, which is all that an answer needs.
    pub(crate) fn keep_names(&mut self) {
        let names = self.list.iter().map(|tool| Tool { name: tool.name.clone(), ..Tool::default() });
        self.list = Arc::new(names.collect());
    }

    /// Names of all tools.
    pub(crate) fn names(&self) -> Arc<[String]> {
        self.list.iter().map(|tool| tool.name.clone()).collect()
    }

    /// The list for the template.
    pub(crate) fn for_template(&self) -> Value {
        Value::Array(self.list.iter().map(|tool| tool.spec.clone()).collect())
    }

    /// What an answer that must call matches, in the model's notation; `None` if the model may choose. `token_id` finds control tokens.
    ///
    /// # Errors
    /// If a control token of the notation is not among the model's.
    pub(crate) fn grammar(
        &self,
        format: CallFormat,
        token_id: impl Fn(&str) -> Option<TokenId>,
    ) -> Result<Option<Grammar>, RequestError> {
        let (only, is_one) = match &self.choice {
            ToolChoice::None | ToolChoice::Auto => return Ok(None),
            ToolChoice::Required => (None, !self.is_parallel),
            ToolChoice::Named(name) => (Some(name), true),
        };
        let pieces = |notation: &str| {
            let piece = |part: NotationPart<'_>| match part {
                NotationPart::Text(text) => Ok(GrammarPiece::Text(text.to_owned())),
                NotationPart::Control(spelling) => token_id(spelling).map(GrammarPiece::Token).ok_or_else(|| {
                    let message = format!("this model has no token {spelling}, so no call can be required");
                    RequestError::new(ErrorKind::Unsupported, message)
                }),
            };
            format.parts(notation).into_iter().map(piece).collect::<Result<Vec<_>, _>>()
        };
        let called = self.list.iter().filter(|tool| only.is_none_or(|only| *only == tool.name));
        let call = |tool: &Tool| {
            let (open, close) = format.around_arguments(&tool.name);
            let mut schema = tool.schema.clone();
            if let (false, Value::Object(schema)) = (tool.is_strict, &mut schema) {
                grammar::lenient(schema);
            }
            Ok(CallGrammar { open: pieces(&open)?, schema: schema.to_string(), close: pieces(&close)? })
        };
        let (open, separator, close) = format.around_calls();
        Ok(Some(Grammar::Calls(CallsGrammar {
            open: pieces(open)?,
            calls: called.map(call).collect::<Result<_, RequestError>>()?,
            separator: separator.filter(|_| !is_one).map(pieces).transpose()?,
            close: pieces(close)?,
        })))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn control_tokens_of_a_notation_are_tokens_of_its_grammar() {
        let tool = |name: &str| Tool { name: name.into(), schema: json!({"type": "object"}), ..Tool::default() };
        let tools = |choice| Tools { list: Arc::new(vec![tool("get"), tool("put")]), choice, is_parallel: true };
        let text = |text: &str| GrammarPiece::Text(text.to_owned());
        let id = |spelling: &str| Some(spelling.len() as TokenId);
        let of = |format, choice| match tools(choice).grammar(format, id) {
            Ok(Some(Grammar::Calls(calls))) => calls,
            other => panic!("{other:?}"),
        };
        let harmony = of(CallFormat::Harmony, ToolChoice::Required);
        let (channel, constrain, message) = (GrammarPiece::Token(11), GrammarPiece::Token(13), GrammarPiece::Token(11));
        let open = |name: &str| {
            let to = text(&format!("commentary to=functions.{name} "));
            vec![channel.clone(), to, constrain.clone(), text("json"), message.clone()]
        };
        assert_eq!((&harmony.open, &harmony.separator, &harmony.close), (&vec![], &None, &vec![]));
        assert_eq!([&harmony.calls[0].open, &harmony.calls[1].open], [&open("get"), &open("put")]);
        let mistral = of(CallFormat::Mistral, ToolChoice::Required);
        assert_eq!(mistral.open, [GrammarPiece::Token(12), text(" [")]);
        assert_eq!((mistral.separator, mistral.close), (Some(vec![text(", ")]), vec![text("]")]));
        let named = of(CallFormat::Hermes, ToolChoice::Named("put".into()));
        assert_eq!((named.calls.len(), named.separator), (1, None));
        let refused = tools(ToolChoice::Required).grammar(CallFormat::DeepSeek, |_| None).unwrap_err();
        assert!(refused.message.contains("<｜tool▁call"), "{refused}");
        assert!(tools(ToolChoice::Auto).grammar(CallFormat::DeepSeek, |_| None).unwrap().is_none());
    }
}
