"""An S3 server on this machine (moto), which a test can make fail, slow down or forget credentials."""

import logging
import threading
import urllib.request

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{0}</Code><Message>{0}</Message></Error>"


class S3Server:
    """`answer(method, path, key)` may return the code of an error of S3, with its status, such as (503, "SlowDown").

    The key is the access key that signed the request. `environment` is that of a client, with the buckets' owner's key.
    """

    def __init__(self, *buckets, answer=lambda method, path, key: None):
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self.answer = answer
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._respond, threaded=True)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}",
            "AWS_ACCESS_KEY_ID": "owner",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # of botocore, beside those of s3fs: an outage shows soon
        }
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        reset = urllib.request.Request(f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset).close()  # the servers of a process share their buckets
        for bucket in buckets:
            self.client().create_bucket(Bucket=bucket)

    def client(self):
        import boto3

        return boto3.Session(aws_access_key_id="owner", aws_secret_access_key="secret").client(
            "s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], region_name="us-east-1"
        )

    def names(self, bucket):
        """The objects of a bucket."""
        return {each["Key"] for each in self.client().list_objects_v2(Bucket=bucket).get("Contents", ())}

    def _respond(self, environ, start_response):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        _, _, signed = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")
        refused = None if path.startswith("/moto-api/") else self.answer(method, path, signed.partition("/")[0])
        if refused:
            status, code = refused
            content = ERROR.format(code).encode()
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{status} {code}", [("Content-Type", "text/xml"), ("Content-Length", str(len(content)))])
            return [content]
        return self._app(environ, start_response)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
