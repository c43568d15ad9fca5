//! The arguments of an instruction as the client takes them.

use std::time::Duration;

use dragoman::{Certificate, ClientTlsConfig, GenerateOptions, Identity, Message, Priority, Prompt, RetryPolicy};
use serde_json::Value;

pub(crate) fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

pub(crate) fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}

fn float(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32)
}

pub(crate) fn numbers(value: &Value) -> Vec<u32> {
    value.as_array().into_iter().flatten().filter_map(number).collect()
}

/// A `Duration` has no values below 0: the bad value that it has is 0, and what the client says of it is to be seen.
pub(crate) fn seconds(value: &Value) -> Option<Duration> {
    value
        .as_f64()
        .map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// The prompt in whichever form it is given.
pub(crate) fn prompt(given: &Value) -> Prompt {
    if let Some(messages) = given["messages"].as_array() {
        let one = |message: &Value| {
            Message::new(
                text(&message["role"]).unwrap_or_default(),
                text(&message["content"]).unwrap_or_default(),
            )
        };
        return messages.iter().map(one).collect::<Vec<_>>().into();
    }
    if let Some(repeated) = given["repeat"].as_str() {
        return repeated.repeat(number(&given["times"]).unwrap_or(1) as usize).into();
    }
    match given["text"].as_str() {
        Some(text) => text.into(),
        None => numbers(&given["token_ids"]).into(),
    }
}

pub(crate) fn generation(given: &Value) -> GenerateOptions {
    GenerateOptions {
        model: text(&given["model"]),
        request_id: text(&given["request_id"]),
        deadline: seconds(&given["deadline"]),
        max_queue_wait: seconds(&given["max_queue_wait"]),
        priority: match given["priority"].as_str() {
            Some("interactive") => Priority::Interactive,
            Some("batch") => Priority::Batch,
            _ => Priority::Standard,
        },
        max_output_tokens: number(&given["max_output_tokens"]),
        min_output_tokens: number(&given["min_output_tokens"]),
        stop: given["stop"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(text)
            .collect(),
        stop_token_ids: numbers(&given["stop_token_ids"]),
        ignore_eos: given["ignore_eos"].as_bool().unwrap_or_default(),
        temperature: float(&given["temperature"]),
        top_p: float(&given["top_p"]),
        top_k: number(&given["top_k"]),
        min_p: float(&given["min_p"]),
        seed: given["seed"].as_u64(),
        num_choices: number(&given["n"]),
        logprobs: number(&given["logprobs"]),
        prompt_logprobs: number(&given["prompt_logprobs"]),
        add_special_tokens: given["add_special_tokens"].as_bool(),
        ..GenerateOptions::default()
    }
}

/// Absent fields are at their defaults.
pub(crate) fn retry(given: &Value) -> RetryPolicy {
    let default = RetryPolicy::default();
    RetryPolicy {
        max_attempts: number(&given["max_attempts"]).unwrap_or(default.max_attempts),
        base_delay: seconds(&given["base_seconds"]).unwrap_or(default.base_delay),
        max_delay: seconds(&given["max_delay_seconds"]).unwrap_or(default.max_delay),
        resume_patience: seconds(&given["resume_patience_seconds"]).unwrap_or(default.resume_patience),
        refused_patience: seconds(&given["refused_patience_seconds"]).unwrap_or(default.refused_patience),
        budget: given["budget"].as_f64().unwrap_or(default.budget),
    }
}

pub(crate) fn tls(given: &Value) -> Option<ClientTlsConfig> {
    let authority = given["ca_pem"].as_str()?;
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority));
    if let (Some(certificate), Some(key)) = (given["certificate_pem"].as_str(), given["key_pem"].as_str()) {
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    Some(tls)
}
