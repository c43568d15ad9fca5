use super::*;
use crate::catalogue::Reason;

fn prepared(prompt: impl Into<Prompt>, options: GenerateOptions) -> Result<Prepared, Error> {
    prepare(prompt.into(), &options, "m".to_owned(), "acme")
}

#[test]
fn the_controller_is_told_sizes_and_a_digest() {
    let options = GenerateOptions {
        max_output_tokens: Some(6),
        num_choices: Some(2),
        priority: Priority::Batch,
        max_queue_wait: Some(Duration::from_millis(1500)),
        ..Default::default()
    };
    let Prepared { generate, acquire } = prepared("hi ü", options).unwrap();
    assert_eq!((acquire.prompt_bytes, acquire.prompt_tokens), (5, None));
    assert_eq!((acquire.max_output_tokens, acquire.num_choices), (6, 2));
    assert_eq!(
        (acquire.priority(), acquire.tenant.as_str()),
        (v1::Priority::Batch, "acme")
    );
    assert_eq!(
        acquire.max_queue_wait,
        Some(prost_types::Duration {
            seconds: 1,
            nanos: 500_000_000
        })
    );
    assert_eq!(acquire.request_id, generate.request_id);
    let acquire = prepared(vec![1, 258, 70000], GenerateOptions::default())
        .unwrap()
        .acquire;
    assert_eq!((acquire.prompt_bytes, acquire.prompt_tokens), (12, Some(3)));
    assert_eq!(acquire.priority(), v1::Priority::Standard);
}

#[test]
fn what_was_not_given_is_not_sent() {
    let generate = prepared("hi", GenerateOptions::default()).unwrap().generate;
    assert_eq!(generate.sampling, Some(v1::SamplingParameters::default()));
    assert_eq!(generate.stop, Some(v1::StopCriteria::default()));
    assert_eq!(generate.text_options, Some(v1::TextOptions::default()));
}

#[test]
fn bad_arguments_name_the_parameter() {
    let zero = Some(Duration::ZERO);
    for (prompt, options, param) in [
        (Prompt::from(""), GenerateOptions::default(), "prompt"),
        (Prompt::Tokens(Vec::new()), GenerateOptions::default(), "prompt"),
        (
            Prompt::from("hi"),
            GenerateOptions {
                deadline: zero,
                ..Default::default()
            },
            "deadline",
        ),
        (
            Prompt::from("hi"),
            GenerateOptions {
                max_queue_wait: zero,
                ..Default::default()
            },
            "max_queue_wait",
        ),
        (
            Prompt::from("hi"),
            GenerateOptions {
                stop: vec![String::new()],
                ..Default::default()
            },
            "stop",
        ),
    ] {
        let error = prepared(prompt, options).unwrap_err();
        assert_eq!(error.reason, Reason::InvalidRequest);
        assert_eq!(error.metadata["param"], param);
        assert!(error.message.starts_with(param), "{error}");
    }
    assert_eq!(messages_of(Vec::new()).unwrap_err().metadata["param"], "messages");
}

#[test]
fn each_form_is_its_own_kind() {
    let kind = |form| {
        let options = GenerateOptions {
            form: Some(form),
            ..Default::default()
        };
        prepared("hi", options)
            .unwrap()
            .generate
            .sampling
            .unwrap()
            .grammar
            .unwrap()
            .kind
            .unwrap()
    };
    assert_eq!(
        kind(Form::JsonSchema("{}".to_owned())),
        grammar::Kind::JsonSchema("{}".to_owned())
    );
    assert_eq!(kind(Form::JsonObject), grammar::Kind::JsonObject(true));
    assert_eq!(
        kind(Form::Regex("a+".to_owned())),
        grammar::Kind::Regex("a+".to_owned())
    );
    assert_eq!(
        kind(Form::Lark("start: \"a\"".to_owned())),
        grammar::Kind::Lark("start: \"a\"".to_owned())
    );
    let texts = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(
        kind(Form::OneOf(texts.clone())),
        grammar::Kind::Choices(v1::GrammarChoices { texts })
    );
}

#[test]
fn ids_are_random_uuids_of_version_4() {
    let ids: std::collections::HashSet<String> = (0..100).map(|_| new_id()).collect();
    assert_eq!(ids.len(), 100);
    for id in ids {
        let parts: Vec<&str> = id.split('-').collect();
        assert_eq!(
            parts.iter().map(|part| part.len()).collect::<Vec<_>>(),
            [8, 4, 4, 4, 12]
        );
        assert!(parts[2].starts_with('4') && "89ab".contains(&parts[3][..1]), "{id}");
    }
}

#[test]
fn jitter_is_between_a_half_and_one() {
    let drawn: Vec<f64> = (0..200).map(|_| new_jitter()).collect();
    assert!(drawn.iter().all(|jitter| (0.5..=1.0).contains(jitter)));
    assert!(drawn.iter().any(|jitter| *jitter < 0.6) && drawn.iter().any(|jitter| *jitter > 0.9));
}
