//! Calls that end in a value.

use std::time::Instant;

use dragoman::{Client, DetokenizeOptions, EmbedOptions, Error, Estimate, Prompt, TokenizeOptions};
use nix::sys::resource::{Usage, UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::options;

/// `None` for a call that is not known.
pub(crate) async fn value_of(client: &Client, what: &str, call: &Value) -> Option<Result<Value, Error>> {
    Some(match what {
        "load_streams" => load_streams(client, call).await,
        "embed" => embed(client, call).await,
        "tokenize" => tokenize(client, call).await,
        "detokenize" => detokenize(client, call).await,
        "quote" => quote(client, call).await,
        "cancel" => {
            let request_id = options::text(&call["request_id"]).unwrap_or_default();
            client.cancel(request_id).await.map(|()| Value::Null)
        }
        "models" => client.models().await.map(|names| json!(names)),
        "agents" => agents(client).await,
        "hardware" => hardware(client, call).await,
        "load" => load(client).await,
        _ => return None,
    })
}

/// Many streams at once, and the CPU seconds of this process for them.
async fn load_streams(client: &Client, call: &Value) -> Result<Value, Error> {
    let before = cpu_seconds();
    let began = Instant::now();
    let mut streams = JoinSet::new();
    for _ in 0..options::number(&call["streams"]).unwrap_or(1) {
        let mut stream = client.generate(options::prompt(&call["prompt"]), options::generation(&call["options"]));
        streams.spawn(async move {
            let (mut tokens, mut items) = (0, 0);
            while let Some(token) = stream.next().await {
                tokens += token?.token_ids.len();
                items += 1;
            }
            Ok::<_, Error>((tokens, items))
        });
    }
    let (mut tokens, mut items) = (0, 0);
    while let Some(joined) = streams.join_next().await {
        let read = joined.expect("a stream that panics is a fault of the client")?;
        tokens += read.0;
        items += read.1;
    }
    Ok(json!({
        "tokens": tokens,
        "items": items,
        "cpu_seconds": cpu_seconds() - before,
        "wall_seconds": began.elapsed().as_secs_f64(),
    }))
}

fn cpu_seconds() -> f64 {
    let usage: Usage = getrusage(UsageWho::RUSAGE_SELF).expect("the system tells what this process used");
    (usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 / 1e6
}

async fn embed(client: &Client, call: &Value) -> Result<Value, Error> {
    let inputs: Vec<Prompt> = call["inputs"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|input| match input.as_str() {
            Some(text) => text.into(),
            None => options::numbers(input).into(),
        })
        .collect();
    let given = &call["options"];
    let asked = EmbedOptions {
        model: options::text(&given["model"]),
        dimensions: options::number(&given["dimensions"]),
        ..EmbedOptions::default()
    };
    let answer = client.embed(inputs, asked).await?;
    Ok(json!({"vectors": answer.vectors, "prompt_tokens": answer.prompt_tokens}))
}

async fn tokenize(client: &Client, call: &Value) -> Result<Value, Error> {
    let given = &call["options"];
    let asked = TokenizeOptions {
        model: options::text(&given["model"]),
        add_special_tokens: given["add_special_tokens"].as_bool(),
        parse_special_tokens: given["parse_special_tokens"].as_bool(),
    };
    Ok(json!(
        client
            .tokenize(options::text(&call["text"]).unwrap_or_default(), asked)
            .await?
    ))
}

async fn detokenize(client: &Client, call: &Value) -> Result<Value, Error> {
    let given = &call["options"];
    let asked = DetokenizeOptions {
        model: options::text(&given["model"]),
        skip_special_tokens: given["skip_special_tokens"].as_bool(),
    };
    Ok(json!(
        client.detokenize(options::numbers(&call["token_ids"]), asked).await?
    ))
}

async fn quote(client: &Client, call: &Value) -> Result<Value, Error> {
    let answer = client
        .quote(options::prompt(&call["prompt"]), options::generation(&call["options"]))
        .await?;
    let seconds = |estimate: Estimate| {
        json!([
            estimate.p10.as_secs_f64(),
            estimate.expected.as_secs_f64(),
            estimate.p90.as_secs_f64()
        ])
    };
    Ok(json!({
        "agent_id": answer.agent_id,
        "time_to_first_token": seconds(answer.time_to_first_token),
        "time_per_output_token": seconds(answer.time_per_output_token),
        "finish": seconds(answer.finish),
    }))
}

async fn agents(client: &Client) -> Result<Value, Error> {
    let members = client.agents().await?;
    let one = |member: dragoman::v1::FleetMember| {
        let age = member.heartbeat_age.unwrap_or_default();
        let agent = member.agent.unwrap_or_default();
        json!({
            "agent_id": agent.agent_id,
            "state": member.state,
            "models": agent.models.iter().map(|served| &served.model).collect::<Vec<_>>(),
            "heartbeat_age_seconds": age.seconds as f64 + f64::from(age.nanos) / 1e9,
        })
    };
    Ok(members.into_iter().map(one).collect())
}

async fn hardware(client: &Client, call: &Value) -> Result<Value, Error> {
    let answer = client.hardware(call["agent_id"].as_str()).await?;
    let device = answer.profile.and_then(|profile| profile.device).unwrap_or_default();
    let chosen: Vec<bool> = answer.candidates.iter().map(|candidate| candidate.chosen).collect();
    Ok(json!({"kind": device.kind, "chosen": chosen}))
}

async fn load(client: &Client) -> Result<Value, Error> {
    let samples = client.load().await?;
    let one = |sample: dragoman::v1::AgentLoadSample| {
        let load = sample.load.unwrap_or_default();
        json!({
            "agent_id": sample.agent_id,
            "running_requests": load.running_requests,
            "waiting_requests": load.waiting_requests,
            "free_kv_blocks": load.free_kv_blocks,
        })
    };
    Ok(samples.into_iter().map(one).collect())
}
