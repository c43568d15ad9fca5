//! Who serves what: the members of the fleet as the controller lists them, or the one agent of a direct client.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic::{Response, Status};

use crate::catalogue::Reason;
use crate::channels::{Address, Channels, stub};
use crate::errors::Error;
use crate::ticket::{CALL_TIMEOUT, Cell, ask_agent, ask_controller, timed};
use crate::v1::fleet_service_client::FleetServiceClient;
use crate::v1::get_tokenizer_response::Part;
use crate::v1::telemetry_service_client::TelemetryServiceClient;
use crate::v1::tokenizer_service_client::TokenizerServiceClient;
use crate::v1::{
    AgentLoadSample, AgentState, FleetMember, GetTokenizerRequest, ListAgentsRequest, ServedModel, WatchLoadRequest,
};

/// How long a list of members is good enough to find an agent for a template or the name of the one model.
const FRESHNESS: Duration = Duration::from_secs(2);

/// Finds models and agents. Owner of the member list, which is at most 2 s old where a model is looked up.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    listed: Mutex<Option<(Instant, Vec<FleetMember>)>>,
    agents_model: Mutex<Option<String>>,
}

impl Directory {
    /// Every member, read now.
    pub(crate) async fn members(&self, channels: &Channels, cell: &Cell) -> Result<Vec<FleetMember>, Error> {
        let Cell::Controllers(controllers) = cell else {
            return Err(Error::invalid(
                "controller",
                "the list of agents comes from a controller, and this client has an agent only",
            ));
        };
        let answer = ask_controller(channels, controllers, CALL_TIMEOUT, |channel| async move {
            stub!(FleetServiceClient, channel)
                .list_agents(timed(ListAgentsRequest {}, CALL_TIMEOUT))
                .await
        })
        .await?;
        *lock(&self.listed) = Some((Instant::now(), answer.members.clone()));
        Ok(answer.members)
    }

    /// Names of the served models, sorted.
    pub(crate) async fn models(&self, channels: &Channels, cell: &Cell) -> Result<Vec<String>, Error> {
        match cell {
            Cell::OpenAgent(address) => Ok(vec![self.model_of_agent(channels, address).await?]),
            Cell::Controllers(_) => Ok(names_of(&self.fresh(channels, cell).await?)),
        }
    }

    /// The model to ask for: the one named, or the only one served.
    pub(crate) async fn resolve(&self, channels: &Channels, cell: &Cell, model: Option<&str>) -> Result<String, Error> {
        if let Some(model) = model.filter(|model| !model.is_empty()) {
            return Ok(model.to_owned());
        }
        if let Cell::OpenAgent(address) = cell {
            return self.model_of_agent(channels, address).await;
        }
        let members = self.fresh(channels, cell).await?;
        // An agent lists one model under each of its names; the first is the one it is shown by.
        let mut by_digest: BTreeMap<&[u8], &str> = BTreeMap::new();
        for served in members.iter().flat_map(served_by) {
            by_digest.entry(&served.model_digest).or_insert(&served.model);
        }
        let names: BTreeSet<&str> = by_digest.into_values().collect();
        let names: Vec<&str> = names.into_iter().collect();
        match names[..] {
            [only] => Ok(only.to_owned()),
            [] => Err(no_agent(
                "no agent has registered with the controller yet; start one, or wait until it is ready",
            )),
            _ => Err(Error::invalid(
                "model",
                format!("several are served ({}); name one", names.join(", ")),
            )),
        }
    }

    /// A serving agent of the model.
    pub(crate) async fn agent_of(&self, channels: &Channels, cell: &Cell, model: &str) -> Result<Address, Error> {
        if let Cell::OpenAgent(address) = cell {
            return Ok(address.clone());
        }
        let members = self.fresh(channels, cell).await?;
        let serves = |member: &&FleetMember| {
            member.state() == AgentState::Serving && served_by(member).iter().any(|served| served.model == model)
        };
        if let Some(member) = members.iter().find(serves) {
            return Ok(address_of(member));
        }
        let names = names_of(&members);
        if names.is_empty() || names.iter().any(|name| name == model) {
            return Err(no_agent(format!(
                "no agent that serves {model:?} is ready now; see 'dragoman ps'"
            )));
        }
        let message = format!("model {model:?} is not served; served: {}", names.join(", "));
        Err(Error::new(Reason::ModelNotServed, message))
    }

    /// The agent of that id; `None` is the only one there is.
    pub(crate) async fn agent_by_id(
        &self,
        channels: &Channels,
        cell: &Cell,
        agent_id: Option<&str>,
    ) -> Result<Address, Error> {
        if let Cell::OpenAgent(address) = cell {
            return Ok(address.clone());
        }
        let found: Vec<Address> = self.members(channels, cell).await?.iter().map(address_of).collect();
        let wanted: Vec<&Address> = found
            .iter()
            .filter(|address| agent_id.is_none_or(|id| id == address.agent_id))
            .collect();
        if let [only] = wanted[..] {
            return Ok(only.clone());
        }
        let known = found
            .iter()
            .map(|address| address.agent_id.as_str())
            .collect::<Vec<_>>()
            .join(", ");
        Err(match agent_id {
            _ if found.is_empty() => no_agent("no agent has registered with the controller yet"),
            None => Error::invalid("agent_id", format!("there are several agents ({known}); name one")),
            Some(id) => Error::invalid("agent_id", format!("there is no agent {id:?} (agents: {known})")),
        })
    }

    /// Every agent that may run requests.
    pub(crate) async fn addresses(&self, channels: &Channels, cell: &Cell) -> Result<Vec<Address>, Error> {
        match cell {
            Cell::OpenAgent(address) => Ok(vec![address.clone()]),
            Cell::Controllers(_) => Ok(self.members(channels, cell).await?.iter().map(address_of).collect()),
        }
    }

    /// One sample of each agent's load.
    pub(crate) async fn load(&self, channels: &Channels, cell: &Cell) -> Result<Vec<AgentLoadSample>, Error> {
        // The first message is all that is wanted; the rest is cancelled.
        let call = |channel| async move {
            let request = timed(WatchLoadRequest::default(), CALL_TIMEOUT);
            let mut samples = stub!(TelemetryServiceClient, channel)
                .watch_load(request)
                .await?
                .into_inner();
            Ok::<_, Status>(Response::new(samples.message().await?.unwrap_or_default()))
        };
        let answer = match cell {
            Cell::OpenAgent(address) => ask_agent(channels, address, CALL_TIMEOUT, call).await?,
            Cell::Controllers(controllers) => ask_controller(channels, controllers, CALL_TIMEOUT, call).await?,
        };
        Ok(answer.agents)
    }

    async fn fresh(&self, channels: &Channels, cell: &Cell) -> Result<Vec<FleetMember>, Error> {
        let listed = lock(&self.listed).clone();
        match listed {
            Some((at, members)) if !members.is_empty() && at.elapsed() <= FRESHNESS => Ok(members),
            _ => self.members(channels, cell).await,
        }
    }

    async fn model_of_agent(&self, channels: &Channels, agent: &Address) -> Result<String, Error> {
        if let Some(known) = lock(&self.agents_model).clone() {
            return Ok(known);
        }
        let first = ask_agent(channels, agent, CALL_TIMEOUT, |channel| async move {
            let request = timed(GetTokenizerRequest::default(), CALL_TIMEOUT);
            let mut parts = stub!(TokenizerServiceClient, channel)
                .get_tokenizer(request)
                .await?
                .into_inner();
            // The header comes first and is all that is wanted.
            Ok(Response::new(parts.message().await?.and_then(|response| response.part)))
        })
        .await?;
        let Some(Part::Header(header)) = first else {
            return Err(Error::new(
                Reason::Internal,
                format!("the agent at {} did not name its model", agent.target),
            ));
        };
        *lock(&self.agents_model) = Some(header.model.clone());
        Ok(header.model)
    }
}

fn lock<T>(held: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

fn served_by(member: &FleetMember) -> &[ServedModel] {
    member.agent.as_ref().map_or(&[], |agent| &agent.models)
}

fn names_of(members: &[FleetMember]) -> Vec<String> {
    let names: BTreeSet<&String> = members.iter().flat_map(served_by).map(|served| &served.model).collect();
    names.into_iter().cloned().collect()
}

fn address_of(member: &FleetMember) -> Address {
    let agent = member.agent.clone().unwrap_or_default();
    Address::new(agent.data_address, agent.agent_id)
}

fn no_agent(message: impl Into<String>) -> Error {
    Error::new(Reason::NoAgent, message)
}
