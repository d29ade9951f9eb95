// KvIngest.WriteByLink at the decode node: lands chunks whose bytes come over a link.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "sluice/v1/ingest.pb.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/ingest/transfer_watch.h"

namespace sluice {

// Returns the reactor of one call, which deletes itself. `options` and `watch` outlive it.
grpc::ServerBidiReactor<v1::WriteByLinkRequest, v1::WriteByLinkResponse>* NewLinkWrite(
    const IngestServiceOptions& options, TransferWatch* watch,
    grpc::CallbackServerContext* context);

}  // namespace sluice
