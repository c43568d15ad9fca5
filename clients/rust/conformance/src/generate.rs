//! Streams, with the actions of a call, to the one end.

use std::time::Duration;

use dragoman::{Client, Error, GenerationResult, GenerationStream, Token};
use serde_json::{Value, json};

use crate::{emit_of, options};

pub(crate) async fn generate(client: &Client, index: usize, call: &Value) -> Result<(), Error> {
    let stream = client.generate(options::prompt(&call["prompt"]), options::generation(&call["options"]));
    let reading = read(stream, index, &call["actions"]);
    let Some(limit) = options::seconds(&call["actions"]["cancel_after_seconds"]) else {
        return reading.await;
    };
    match tokio::time::timeout(limit, reading).await {
        Ok(ended) => ended,
        Err(_) => {
            emit_of(index, "cancelled", json!({}));
            Ok(())
        }
    }
}

/// Emits each item; pauses and cancels as told.
async fn read(mut stream: GenerationStream, index: usize, actions: &Value) -> Result<(), Error> {
    let cancel_after = options::number(&actions["cancel_after_tokens"]).map(|number| number as usize);
    let mut pause_after = options::number(&actions["pause_after_tokens"]).map(|number| number as usize);
    let mut num_tokens = 0;
    loop {
        if cancel_after.is_some_and(|after| num_tokens >= after) {
            drop(stream);
            emit_of(index, "cancelled", json!({}));
            return Ok(());
        }
        if pause_after.is_some_and(|after| num_tokens > 0 && num_tokens >= after) {
            pause_after = None;
            let pause = options::seconds(&actions["pause_seconds"]).unwrap_or(Duration::ZERO);
            tokio::time::sleep(pause).await;
        }
        let Some(item) = stream.next().await else { break };
        let token = item?;
        num_tokens += token.token_ids.len();
        emit_of(index, "token", line_of(&token));
    }
    let result = stream.result().await?;
    emit_of(index, "result", document_of(&result));
    Ok(())
}

fn line_of(token: &Token) -> Value {
    json!({
        "cursor": token.cursor,
        "choice": token.choice,
        "token_ids": token.token_ids,
        "text": token.text,
        "finish_reason": token.finish_reason.map(|reason| reason.as_str()),
        "num_logprobs": token.logprobs.len(),
    })
}

fn document_of(result: &GenerationResult) -> Value {
    let choices: Vec<Value> = result
        .choices
        .iter()
        .map(|choice| {
            json!({
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason.as_str(),
                "stop_string": choice.stop_string,
                "stop_token_id": choice.stop_token_id,
                "num_logprobs": choice.logprobs.len(),
            })
        })
        .collect();
    json!({
        "request_id": result.request_id,
        "model": result.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "cached_tokens": result.usage.cached_tokens,
            "output_tokens": result.usage.output_tokens,
        },
        "seed": result.seed,
        "agent_id": result.agent_id,
        "num_resumes": result.num_resumes,
    })
}
